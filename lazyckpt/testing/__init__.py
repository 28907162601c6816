"""Test a reader of another package against the contract that every format of lazyckpt is held to. Needs pytest.

Write a checkpoint with the real library, keep what the process held as the truth, and run `CHECKS` on both:

    import lazyckpt.testing as testing

    @pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
    def test_contract(check, tmp_path):
        state = {"up.weight": torch.randn(8, 4)}
        my_format.save(state, tmp_path / "model.mine")
        check(testing.Case(tmp_path / "model.mine", {"weights": state}, {}))

The truth has to be complete: every state, and all of its names, tied ones too in the states "weights" and "fp32".
`opened` opens a checkpoint over a store that counts requests and bytes.
"""

from .case import Case, bit_equal
from .contract import CHECKS, Check, open_case
from .counting import CountingStore, Counts, Request, opened
from .oracle import same

__all__ = ["CHECKS", "Case", "Check", "CountingStore", "Counts", "Request", "bit_equal", "open_case", "opened", "same"]
