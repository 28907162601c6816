import pytest
from . import contract
from .conftest import complete
from .writers import Case
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda c: c.__name__)
def test_contract(zero_option_case: Case, check): check(complete(zero_option_case))
@pytest.mark.parametrize("check", contract.CHECKS[:8], ids=lambda c: c.__name__)
def test_cross(zero_cross_case: Case, check): check(complete(zero_cross_case))
