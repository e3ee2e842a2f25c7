"""The official OpenAI client over Molt's socket: streams through a switch, structured answers, likelihoods, errors."""

import json
import os

import httpx
import openai

transport = httpx.HTTPTransport(uds=os.environ["SOCKET"])
http = httpx.Client(transport=transport, base_url="http://molt", timeout=120)
client = openai.OpenAI(base_url="http://molt/v1", api_key="none", http_client=http, max_retries=0)
messages = [{"role": "user", "content": "The past year has been one of peace."}]


def figure(name, label):
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and label in line)


def budget(count):
    assert http.put("/v1/budget", json={"budget_bytes": int(count)}).status_code == 200


assert [model.id for model in client.models.list()] == ["pocket"]

# The cut comes over another connection and may be too late for an answer as short-lived as this: try again.
for _ in range(20):
    budget(256 << 20)
    stream = client.chat.completions.create(
        model="pocket", messages=messages, max_tokens=300, seed=3, stream=True, stream_options={"include_usage": True}
    )
    text, switches, finish, usage = "", [], None, None
    for number, chunk in enumerate(stream):
        if number == 0:
            weights = figure("molt_rung_weights_bytes", 'rung="0"')
            budget(figure("molt_usage_kind_bytes", "overhead") + weights)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        if chunk.molt.get("event") == "switch":
            switches.append((chunk.molt["from"], chunk.molt["to"]))
        usage = chunk.usage or usage
    assert finish in ("stop", "length") and text and usage.completion_tokens > 0, (finish, text, usage)
    if switches:
        break
else:
    raise SystemExit("twenty answers ended before their budget could be cut")
budget(256 << 20)

schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model="pocket",
    messages=messages,
    max_tokens=120,
    logprobs=True,
    top_logprobs=2,
    response_format={"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}},
)
person = json.loads(answer.choices[0].message.content)
assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99, person
assert all(len(token.top_logprobs) == 2 for token in answer.choices[0].logprobs.content)

completion = client.completions.create(model="pocket", prompt="The people of", max_tokens=8, logprobs=1)
assert "".join(completion.choices[0].logprobs.tokens) == completion.choices[0].text

try:
    client.chat.completions.create(model="pocket", messages=messages, n=2)
    raise SystemExit("n=2 was taken")
except openai.BadRequestError as error:
    assert error.code == "n", error
try:
    client.with_options(api_key="molt-nobody").chat.completions.create(model="pocket", messages=messages)
    raise SystemExit("a token of nobody was taken")
except openai.AuthenticationError as error:
    assert error.code == "unknown_token", error
print("all is well:", switches, person)
