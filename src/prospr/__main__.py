"""`python -m prospr` is the command `prospr`."""

from prospr.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
