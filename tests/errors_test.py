"""The error a user reads, and the check behind most of them."""

import pytest

from jprm.errors import UserError, one_of


def test_an_allowed_value_passes():
    assert one_of("b", ("a", "b"), where="config.x") is None


@pytest.mark.parametrize(
    "where, text",
    [
        ("config.rl.kl_in", "config.rl.kl_in: found kl_in 'no'; expected one of loss, reward. Set config.rl.kl_in=loss."),
        ("jprm.rl.f.how", "jprm.rl.f.how: found how 'no'; expected one of loss, reward. Name one of them."),
    ],
    ids=["config", "argument"],
)
def test_another_value_is_named_with_the_allowed_ones(where, text):
    with pytest.raises(UserError) as error:
        one_of("no", ("loss", "reward"), where=where)
    assert str(error.value) == text and error.value.found == f"{where.rpartition('.')[2]} 'no'"
