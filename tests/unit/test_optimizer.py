"""The learning-rate schedule of a run that goes on, and a loss that is not finite."""

from collections.abc import Iterator

import pytest
import torch

from models.config import OptimizerConfig
from moe_rl.metrics import Metrics
from moe_rl.update import Updated, update_metrics
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


@pytest.mark.parametrize(("total", "wanted"), [(10, 5e-3), (20, 7.5e-3), (5, 0.0)])
def test_a_run_that_goes_on_with_more_steps_has_the_schedule_of_the_longer_run(
    runtime: Runtime, total: int, wanted: float
) -> None:
    """5 updates of a linear decay over 10 from 0.01, continued under a decay over `total`."""
    settings = OptimizerConfig(lr=0.01, schedule="linear")
    with built(Case(), runtime) as model:
        first = model.optimizer(settings, 10)
        first.schedule.step(increment=5)
        assert first.lr == pytest.approx(5e-3)
        second = model.optimizer(settings, total)
        second.schedule.load_state_dict(first.schedule.state_dict())
        assert second.lr == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run(runtime: Runtime, value: float) -> None:
    """Its gradient may be 0, which the optimizer takes for one."""
    metrics = Metrics()
    metrics.add("loss/total", torch.tensor(value), 1)
    with built(Case(), runtime) as model, pytest.raises(FloatingPointError, match=f"the loss is {value}: a log-probability"):
        update_metrics([Updated(metrics, {}, 0.0)], model.groups, [])
