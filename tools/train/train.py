"""Train the `tiny` preset: seeded, resumable, under an hour on two CPU cores.

    python -m venv .venv-train && .venv-train/bin/pip install -e '.[train]'
    .venv-train/bin/python tools/train/train.py --out build/tiny

Phase 1 trains the main model and its first MTP layer together (DeepSeek-V3, section 2.2), with a selection
bias instead of an auxiliary balance loss (section 2.1.2). Phase 2 trains a second MTP layer with everything
else frozen (xDeepServe, section 4.6). Interrupted, the same command goes on where it was; the same seed on
the same machine and number of threads gives the same curve and the same file.

Writes a Hugging Face directory, and `training.json` beside the weights: the recipe and the loss curve.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor

from config import MODEL, Recipe
from data import make_batch
from export import export
from model import Batch, Model
from muon import Muon
from tokenizer import train_tokenizer

SAVE_EVERY = 100
LOG_EVERY = 25
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Trainer:
    """One phase of training and all that must be saved to go on with it."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.tokenizer = recipe, tokenizer
        self.model = Model(MODEL)
        self.curve: list[dict[str, float]] = []
        self.phase, self.step = 1, 0
        self.optimizers: list[torch.optim.Optimizer] = []
        self._begin_phase(1)

    @property
    def steps(self) -> int:
        return self.recipe.steps if self.phase == 1 else self.recipe.mtp2_steps

    def _begin_phase(self, phase: int) -> None:
        """Choose what learns, with fresh optimizer state."""
        self.phase, self.step = phase, 0
        second = f"model.layers.{MODEL['num_hidden_layers'] + 1}."
        chosen = []
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith(second) == (phase == 2))
            if parameter.requires_grad:
                chosen.append((name, parameter))
        is_matrix = {
            name: p.ndim >= 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))
            for name, p in chosen
        }
        r = self.recipe
        matrices = [p for name, p in chosen if is_matrix[name]]
        others = [p for name, p in chosen if not is_matrix[name]]
        self.optimizers = [
            Muon(matrices, lr=r.muon_lr, weight_decay=r.weight_decay),
            torch.optim.AdamW(others, lr=r.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def rate(self) -> float:
        """Share of the full learning rate: warm-up, plateau, linear decay."""
        r, steps = self.recipe, self.steps
        decay = (steps - self.step) / (steps * (1 - r.decay_from))
        return min(1.0, (self.step + 1) / r.warm_up, decay)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        model = self.model
        if self.phase == 1:
            hidden = model.hidden(batch)
            drafted = model.draft(0, hidden, batch.targets[0], batch)
            return {"main": model.loss(hidden, batch, 0), "mtp1": model.loss(drafted, batch, 1)}
        with torch.no_grad():
            drafted = model.draft(0, model.hidden(batch), batch.targets[0], batch)
        drafted = model.draft(1, drafted, batch.targets[1], batch)
        return {"mtp2": model.loss(drafted, batch, 2)}

    def train_step(self) -> dict[str, float]:
        r, rate = self.recipe, self.rate()
        batch = make_batch(self.tokenizer, r.seed + self.phase, self.step, r.documents)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = self.losses(batch)
        total = losses["main"] + r.mtp_weight * losses["mtp1"] if self.phase == 1 else losses["mtp2"]
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), r.grad_clip)
        for optimizer, lr in zip(self.optimizers, (r.muon_lr, r.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._balance(rate)
        self.step += 1
        return {name: float(loss.detach()) for name, loss in losses.items()} | {"tokens": len(batch.ids)}

    def _balance(self, rate: float) -> None:
        """Raise the selection bias of experts that had less than their share, lower the others'."""
        for layer in self.model.moe_layers():
            if layer.gate.weight.requires_grad:
                bias = layer.gate.e_score_correction_bias
                bias += self.recipe.bias_rate * rate * torch.sign(layer.counts.mean() - layer.counts)

    def run(self, save: Callable[[], None], stop_after: float | None = None) -> bool:
        """Both phases; False if `stop_after` seconds ended them early."""
        started, tokens = time.perf_counter(), 0
        while True:
            if self.step == self.steps:
                if self.phase == 2:
                    return True
                self._begin_phase(2)
            entry = self.train_step()
            tokens += int(entry.pop("tokens"))
            if self.step % LOG_EVERY == 0 or self.step == self.steps:
                self.curve.append({"phase": self.phase, "step": self.step, **entry})
                speed = tokens / (time.perf_counter() - started)
                shown = "  ".join(f"{name} {loss:.4f}" for name, loss in entry.items())
                print(
                    f"phase {self.phase}  step {self.step}/{self.steps}  {shown}  {speed:,.0f} tokens/s",
                    flush=True,
                )
            if self.step % SAVE_EVERY == 0 or self.step == self.steps:
                save()
            if stop_after is not None and time.perf_counter() - started > stop_after:
                save()
                return False

    def state(self) -> dict[str, object]:
        return {
            "recipe": msgspec.to_builtins(self.recipe),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "phase": self.phase,
            "step": self.step,
            "curve": self.curve,
        }

    def load(self, state: dict) -> None:  # type: ignore[type-arg]
        if state["recipe"] != msgspec.to_builtins(self.recipe):
            raise SystemExit("the saved state was trained with another recipe: choose another --out")
        self._begin_phase(state["phase"])
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.curve = state["step"], state["curve"]


def keep_memory() -> None:
    """Have the C library keep freed memory: without it a third of the time goes into fetching it again."""
    with contextlib.suppress(OSError, AttributeError):
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, 2**30)


def overrides(pairs: list[str]) -> Iterator[tuple[str, float | int]]:
    for pair in pairs:
        name, _, value = pair.partition("=")
        yield name, type(getattr(Recipe(), name))(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write, and to go on from")
    parser.add_argument("--threads", type=int, default=1, help="more than 1 rarely pays at this size")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="save and stop, to go on later")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    keep_memory()
    recipe = msgspec.structs.replace(Recipe(), **dict(overrides(args.set)))
    tokenizer = train_tokenizer(args.out, MODEL["max_position_embeddings"])
    trainer = Trainer(recipe, tokenizer)
    count = sum(p.numel() for p in trainer.model.parameters())
    print(f"{count:,} parameters, {recipe.steps} + {recipe.mtp2_steps} steps", flush=True)
    path = args.out / "state.pt"
    if path.is_file():
        trainer.load(torch.load(path, weights_only=True))
        print(f"going on from phase {trainer.phase}, step {trainer.step}", flush=True)

    def save() -> None:
        part = path.with_suffix(".part")
        torch.save(trainer.state(), part)
        part.replace(path)

    is_done = trainer.run(save, args.stop_after)
    export(trainer.model, args.out)
    report = {"recipe": msgspec.to_builtins(recipe), "parameters": count, "curve": trainer.curve}
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    if not is_done:
        print("stopped early: run the same command again to go on")


if __name__ == "__main__":
    main()
