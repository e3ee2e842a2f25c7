#!/usr/bin/env python3
"""A batch tenant with the official OpenAI client, over Molt's Unix socket.

    python3 tenants/batch.py /run/molt/molt.sock notes "A first text" "A second text"

registers as the batch tenant `notes`, asks for one answer a text, and prints each with the rungs that wrote it. Needs
`pip install openai`.
"""

import sys

from openai import OpenAI

try:  # The HTTP library that the client itself uses: httpx2 from its version 3 on.
    import httpx2 as httpx
except ImportError:
    import httpx


def register(http: httpx.Client, name: str) -> str:
    """Returns the token that is this tenant's API key."""
    answer = http.post("http://molt/v1/tenants", json={"name": name, "class": "batch", "weight": 1})
    if answer.is_error:
        sys.exit(f"cannot register: {answer.json()['error']['message']}")
    return answer.json()["token"]


def ask(client: OpenAI, model: str, text: str) -> None:
    """Streams one answer. What Molt tells of rungs stands in each chunk's extra field `molt`."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=60,
        seed=3,
        stream=True,
    )
    words, rungs = [], []
    for chunk in stream:
        molt = (chunk.model_extra or {}).get("molt", {})
        if chunk.choices and chunk.choices[0].delta.content:
            words.append(chunk.choices[0].delta.content)
            if not rungs or rungs[-1] != molt["rung"]:
                rungs.append(molt["rung"])
        elif molt.get("event") == "switch":
            print(f"[tier{molt['from']} -> tier{molt['to']} in {molt['switch_ms']:.0f} ms]", file=sys.stderr)
    print(f"{text!r} by {', '.join(f'tier{rung}' for rung in rungs)}:{''.join(words)!r}", flush=True)


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit("usage: batch.py SOCKET NAME TEXT...")
    socket, name, *texts = sys.argv[1:]
    # The host is any name: the socket is the address. A batch may wait long for its turn.
    http = httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=httpx.Timeout(600))
    token = register(http, name)
    client = OpenAI(base_url="http://molt/v1", api_key=token, http_client=http)
    try:
        model = client.models.list().data[0].id
        for text in texts:
            ask(client, model, text)
    finally:
        http.delete("http://molt/v1/tenants/me", headers={"Authorization": f"Bearer {token}"})


if __name__ == "__main__":
    main()
