"""Train a model a little, and after each step push its weights and KV scales into a running engine.

    .venv/bin/python examples/rl_weight_sync.py [--steps 4]

Gemma 3 270M is trained by transformers and AdamW on a short text. vLLM serves it beside the trainer,
its KV cache quantized to FP8; each push is one call of `reload_weights`, which takes effect whole or
not at all. After it the engine measures the loss of the text itself. In the end a new process starts
from the trained checkpoint and has to say exactly what the engine says that was never restarted.
Exits with 1 when it does not.
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "rl"
BASE, QUANTIZED = "gemma", "gemma-kv"
#: The largest number of FP8 (e4m3): a KV scale maps the largest element seen to it.
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
#: What is learnt.
TEXT = """The tide mill at Ashby stood idle for sixty years before anyone thought to open its doors.
When the carpenters came in the spring they found the great wheel whole, the oak as hard as iron, and in
the loft a ledger that named every farmer who had brought his grain. They set the stones by the old
marks, and on the first high water in May the wheel turned, slowly at first, then with a sound that the
whole village had forgotten and knew at once."""


class Trainer:
    """Gemma 3 in float32, trained on one text by AdamW."""

    def __init__(self, directory: Path, tokens: list[int], learning_rate: float) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._tokens = torch.tensor([tokens])
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)

    def step(self) -> None:
        """Train once on the text."""
        loss = self.model(self._tokens, labels=self._tokens, use_cache=False).loss
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def loss(self) -> float:
        """The loss with the weights that are pushed, which are rounded to bfloat16."""
        with torch.no_grad():
            rounded = copy.deepcopy(self.model).to(torch.bfloat16)
            return float(rounded(self._tokens, labels=self._tokens, use_cache=False).loss)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a checkpoint holds: weights in bfloat16, and float32 scales for k and v."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(torch.bfloat16)
        yield from self._kv_scales()

    def _kv_scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Calibrate on the text: the largest key and value of each layer become FP8's largest number."""
        with torch.no_grad():
            cache = self.model(self._tokens, use_cache=True).past_key_values
        for index, layer in enumerate(cache.layers):
            for kind, tensor in (("k", layer.keys), ("v", layer.values)):
                scale = tensor.abs().amax().float() / FP8_MAX
                yield f"model.layers.{index}.self_attn.{kind}_scale", scale.reshape(1)


class Server:
    """vLLM in this process, with an FP8 KV cache."""

    def __init__(self, directory: Path) -> None:
        from vllm import LLM

        self._llm = LLM(
            str(directory),
            kv_cache_dtype="fp8",
            block_size=32,  # the CPU's FP8 KV cache takes multiples of 32
            max_model_len=512,
            enforce_eager=True,
            seed=0,
        )

    def push(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take new weights and scales; raises, and keeps the old ones, when they can't be taken."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def logprobs(self, tokens: list[int]) -> list[float]:
        """The log probability of each token but the first, given those before it."""
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        (output,) = self._llm.generate([{"prompt_token_ids": tokens}], asked, use_tqdm=False)
        positions = output.prompt_logprobs or []
        return [
            position[token].logprob
            for token, position in zip(tokens, positions, strict=True)
            if position is not None
        ]


def prepare(name: str) -> Path:
    """Return a model's directory; its first call builds it."""
    command = [sys.executable, str(ROOT / "tools" / "models.py"), name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def write(weights: Iterator[tuple[str, torch.Tensor]], like: Path, directory: Path) -> None:
    """Write `weights` as a checkpoint with the configuration and tokenizer of `like`."""
    from safetensors.torch import save_file

    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(like, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})


def fresh(directory: Path, tokens: list[int]) -> list[float]:
    """The log probabilities by an engine in a new process that starts from `directory`."""
    answer = CACHE / "fresh.json"
    answer.unlink(missing_ok=True)
    task = json.dumps({"directory": str(directory), "tokens": tokens, "answer": str(answer)})
    subprocess.run([sys.executable, __file__, "--fresh", task], check=True)
    found: list[float] = json.loads(answer.read_text())
    return found


def loss(logprobs: list[float]) -> float:
    """The mean loss in nats a token."""
    return -sum(logprobs) / len(logprobs)


def main() -> int:
    """Run the loop, or the engine that is compared with in the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--fresh", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # An iterator of tensors can't be sent to another process; a trainer elsewhere sends a path.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.fresh:
        task = json.loads(args.fresh)
        found = Server(Path(task["directory"])).logprobs(task["tokens"])
        Path(task["answer"]).write_text(json.dumps(found))
        return 0
    return run(args.steps, args.learning_rate)


def run(steps: int, learning_rate: float) -> int:
    """Train, push and measure `steps` times; returns the exit status."""
    from transformers import AutoTokenizer

    CACHE.mkdir(parents=True, exist_ok=True)
    base, quantized = prepare(BASE), prepare(QUANTIZED)
    tokens: list[int] = AutoTokenizer.from_pretrained(base)(TEXT).input_ids
    trainer, server = Trainer(base, tokens, learning_rate), Server(quantized)
    print(f"\n{len(tokens)} tokens; losses in nats a token\n")
    print(f"  {'step':<6}{'loss, engine':>14}{'loss, trainer':>16}{'train':>10}{'push':>9}")
    for step in range(steps + 1):
        began = time.perf_counter()
        if step:
            trainer.step()
        trained = time.perf_counter()
        server.push(trainer.weights())
        pushed = time.perf_counter()
        print(
            f"  {step:<6}{loss(server.logprobs(tokens)):>14.4f}{trainer.loss():>16.4f}"
            f"{trained - began:>8.1f} s{pushed - trained:>7.1f} s",
            flush=True,
        )
    here = server.logprobs(tokens)
    write(trainer.weights(), quantized, CACHE / "trained")
    there = fresh(CACHE / "trained", tokens)
    same = here == there
    print(
        f"\n  an engine started from the trained checkpoint: loss {loss(there):.4f}, "
        f"{len(there)} logprobs {'identical, bit for bit' if same else 'DIFFERENT'}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
