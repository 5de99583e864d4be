"""Asks the swarm's gateway for completions with OpenAI's own client.

    swarm-node gateway --at 127.0.0.1:8000                  # beside a seed with nodes
    python examples/openai_client.py --url http://127.0.0.1:8000/v1 "Once upon a time"

Beside OpenAI's fields, each choice has `token_ids`, and `versions`: the (epoch, version) that generated each token.
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the gateway's (default: %(default)s)")
    parser.add_argument("--model", default="policy", help="the gateway's --model-name (default: %(default)s)")
    parser.add_argument("--api-key", default="none", help="the gateway's key, if it has one")
    parser.add_argument("-n", type=int, default=2, help="completions to ask for")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()

    client = OpenAI(base_url=args.url, api_key=args.api_key)
    answer = client.completions.create(model=args.model, prompt=args.prompt, n=args.n, max_tokens=args.max_tokens)
    for choice in answer.choices:
        versions = sorted({tuple(version) for version in choice.model_extra["versions"]})
        print(f"{choice.finish_reason} {versions} {choice.text!r}", flush=True)


if __name__ == "__main__":
    main()
