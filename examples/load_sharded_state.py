"""Start vLLM from a saved state and continue a sentence.

    python examples/load_sharded_state.py --model /path/to/saved --prompt "Once upon a time"

Takes vLLM's engine arguments. A state is bound to what shaped it: give the same tensor and pipeline
parallel sizes, quantization and KV-cache dtype as when it was saved.
"""

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Generate from the directory that the command line names."""
    parser = FlexibleArgumentParser(description="Generate from a saved state.")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(load_format="sharded_state")
    parser.add_argument("--prompt", default="The old lighthouse at the edge of the bay")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    sampling = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    for request in llm.generate([args.prompt], sampling):
        print(args.prompt + request.outputs[0].text)


if __name__ == "__main__":
    main()
