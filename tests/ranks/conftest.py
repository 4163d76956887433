import pytest
from ranks.pool import Pool


@pytest.fixture(scope="package")
def pool():
    made = Pool()
    yield made
    made.close()
