"""Makes `deepspeed_checkpoints/`: what DeepSpeed saves after three steps, and the losses of the next three.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 -m tests.checkpoint.make_deepspeed_checkpoints

It needs the extra `peers`. `test_convert.py` reads the files without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.models import CASES, build

CASE = "tied"

FOLDER = Path(__file__).parent / "deepspeed_checkpoints"
SAVED, MORE = 3, 3


def config(stage: int) -> dict[str, Any]:
    """The same for DeepSpeed and for dsgraph."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
    }


def losses(engine: Any, first: int, last: int) -> list[float]:
    """This rank's losses in steps `first` to `last`, of two micro-batches each."""
    found = []
    for number in range(2 * first, 2 * last):
        loss = engine(*CASES[CASE].batches(number, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


def main() -> None:
    import deepspeed

    for stage in (1, 2, 3):
        model = build(CASE)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage))
        losses(engine, 0, SAVED)
        engine.save_checkpoint(str(FOLDER), f"stage{stage}", client_state={"seen": SAVED})
        found = losses(engine, SAVED, SAVED + MORE)
        if dist.get_rank() == 0:
            (FOLDER / f"stage{stage}.json").write_text(json.dumps(found) + "\n")
    if dist.get_rank() == 0:
        for script in FOLDER.rglob("*.py"):  # DeepSpeed's own converter, which it lays beside the files
            script.unlink()
        (FOLDER / "latest").unlink()


if __name__ == "__main__":
    main()
