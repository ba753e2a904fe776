"""Ask `paradraft serve` with OpenAI's client, as a stream.

python examples/serve_client.py                      # serves the embedded family itself
python examples/serve_client.py http://127.0.0.1:8000/v1 "Write 6 euros and 70 cents in cents."
"""

import subprocess
import sys

from openai import OpenAI


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
            print(f"\n{chunk.usage.completion_tokens} tokens: {chunk.usage.completion_tokens_details}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(*sys.argv[1:])
    else:
        command = [sys.executable, "-m", "hf_paradraft.cli", "serve", "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            main(server.stdout.readline().strip(), "Write 6 euros and 70 cents in cents.")
            server.terminate()
