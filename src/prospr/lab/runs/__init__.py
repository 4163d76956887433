"""What a run is on disk and what it is made of; `prospr.lab.run` runs one. Nothing is imported here."""
