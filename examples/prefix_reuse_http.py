"""Ask two questions about one long text over the HTTP API and see that its prefix is computed once.

Needs a running cluster, `tanghulu up` or `tanghulu up --engine mock --model mock`. You will see how many tokens of each
prompt were not computed: none for the first question, nearly all of the text for the second (from the worker's own
cache), and the same after the workers' caches were dropped (from the store).

    python examples/prefix_reuse_http.py [URL, default http://127.0.0.1:8000]
"""

import sys
import time
import uuid

import httpx

TEXT = "Rule {}: a chunk that nobody reads goes before a chunk that somebody reads. "


def ask(http: httpx.Client, model: str, text: str, question: str) -> int:
    """Print the figures of one answer; returns how many tokens of the prompt were not computed."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    usage = http.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{question:<22} prompt of {usage['prompt_tokens']} tokens, {cached} not computed")
    return cached


def main(url: str) -> None:
    # A name of its own, so that no earlier run of this example has left the text in a cache.
    text = f"Handbook {uuid.uuid4()}. " + "".join(TEXT.format(number) for number in range(20))
    with httpx.Client(base_url=url, timeout=120) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        ask(http, model, text, "What goes first?")
        ask(http, model, text, "What goes last?")

        # Blocks are written to the store behind the computation: a moment later the workers can do without theirs.
        for _ in range(20):
            http.post("/flush_cache").raise_for_status()
            if ask(http, model, text, "And from the store?"):
                break
            time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
