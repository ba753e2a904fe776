"""Ask `paradraft serve` with OpenAI's client, as a stream.

python examples/serve_client.py                      # serves the embedded family itself
python examples/serve_client.py http://127.0.0.1:8000/v1 "1. Write 9 euros and 99 cents in cents."
"""

import subprocess
import sys

from openai import OpenAI

QUESTION = (
    "1. Write 6 euros and 70 cents in cents.\n2. The exam is 2 days after 31 July. Which date is "
    "the exam?"
)


def main(address: str, question: str) -> None:
    """Print the answer as it comes, then what was drafted for it."""
    client = OpenAI(base_url=address, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(
                f"\n{chunk.usage.completion_tokens} tokens: {chunk.usage.completion_tokens_details}"
            )


if __name__ == "__main__":
    if "--help" in sys.argv:
        print(__doc__)
    elif len(sys.argv) > 1:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else QUESTION)
    else:
        command = [sys.executable, "-m", "hf_paradraft.cli", "serve", "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            main(server.stdout.readline().strip(), QUESTION)
            server.terminate()
