"""One state dict on its way into a folder, over Megatron's planner and writer."""

import queue
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Shards:
    """What this rank writes of a state, planned with the others (collective).

    copied: the tensors are copied now, so that `write` may run while training goes on; else they must not change until then.
    """

    def __init__(self, state: dict[str, Any], folder: Path, *, copied: bool) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        planned: list[Any] = []

        class Strategy(TorchDistSaveShardedStrategy):
            def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, async_strategy: Any) -> Any:
                planned.extend(save_state_dict_ret[:2])
                return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)

        # Megatron 0.19 asks a process of its own for a queue, though nothing here is written in another process
        filesystem_async._results_queue = queue.Queue()
        self._strategy = Strategy()
        content = {"ranks": dist.get_world_size(), "random": sorted(state.get("random", {}))}
        dist_checkpointing.save(
            state, str(folder), self._strategy, async_sharded_save=True, async_strategy="mcore", content_metadata=content
        )
        self._folder = folder
        self._writer, self._metadata = planned
        self._buckets = [
            (path, key, (data, [(item, tensor.to("cpu", copy=copied)) for item, tensor in tensors]))
            for path, key, (data, tensors) in self._writer.write_buckets
        ]
        self._writer.write_buckets = None
        self._results: list[Any] = []

    def write(self) -> list[Path]:
        """This rank's files, written and stored. No collective. Raises what writing raises: OSError, or the RuntimeError that
        torch makes of it."""
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []  # as Megatron asks
        for number, bucket in enumerate(self._buckets):
            _, found = self._writer.write_preloaded_data(transforms, number, bucket, None, None, True)
            if isinstance(found, Exception):
                raise found
            self._results += found
        paths = [Path(path) for path, *_ in self._buckets]
        self._buckets = []
        return paths

    @property
    def results(self) -> list[Any]:
        """Where in the files each tensor lies, for `finish`."""
        return self._results

    def finish(self, results: list[list[Any]]) -> None:
        """The folder's tables of contents, on rank 0, from the results of every rank."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(self._folder))
