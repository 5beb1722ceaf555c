"""Ask the edge as the openai package does: models, answers, streams, tool calls, and without a key.

The test of the edge runs it on the node, in the engine's own tree. {"url", "model", "key", "ca"} comes as
JSON on stdin.
"""

import json
import pathlib
import sys

import httpx
import openai

GIVEN = json.load(sys.stdin)
TOKENIZER = pathlib.Path("/opt/sglang/current/model/tokenizer.json")
PLACES = ["Oslo", "Rome"]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": PLACES}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of a place", "parameters": PARAMETERS}


def connect(key):
    client = httpx.Client(verify=GIVEN["ca"])
    return openai.OpenAI(base_url=GIVEN["url"], api_key=key, max_retries=0, http_client=client)


def complete(**more):
    message = {"role": "user", "content": "Hi"}
    return connect(GIVEN["key"]).chat.completions.create(
        model=GIVEN["model"], messages=[message], temperature=0, **more
    )


def text():
    assert [model.id for model in connect(GIVEN["key"]).models.list()] == [GIVEN["model"]]
    plain = complete(max_tokens=16).choices[0].message.content
    pieces = complete(max_tokens=16, stream=True)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert plain == streamed and len(plain) == 16, (plain, streamed)


def tools_that_are_offered():
    tool = {"type": "function", "function": WEATHER}
    answer = complete(max_tokens=16, tools=[tool], tool_choice="auto").choices[0]
    # The tiny model calls nothing of itself.
    assert (answer.finish_reason, answer.message.tool_calls) == ("length", None), answer


def tools_that_are_asked_for():
    """Told to call, it writes a call in the model's own format, since the grammar leaves it nothing else."""
    tool = {"type": "function", "function": {**WEATHER, "strict": True}}
    choice = {"type": "function", "function": {"name": "weather"}}
    # Where the grammar has a choice the tiny model would go on for ever, and spell the format's own tokens by
    # their characters: what ends a number or a blank is made likely, and those tokens more so.
    vocabulary = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    likely = {str(vocabulary["model"]["vocab"][sign]): 100 for sign in '":{}'}
    likely.update(
        (str(token["id"]), 200) for token in vocabulary["added_tokens"] if "tool_call" in token["content"]
    )
    ask = {"tools": [tool], "tool_choice": choice, "max_tokens": 64, "logit_bias": likely}
    answer = complete(**ask).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.function.name) == ("tool_calls", "weather"), answer
    assert json.loads(call.function.arguments)["place"] in PLACES, call
    pieces = [piece.choices[0] for piece in complete(stream=True, **ask)]
    parts = [part.function for piece in pieces for part in piece.delta.tool_calls or []]
    assert [part.name for part in parts if part.name] == ["weather"], parts
    assert "".join(part.arguments or "" for part in parts) == call.function.arguments, parts
    assert len(parts) > 2 and pieces[-1].finish_reason == "tool_calls", pieces


def no_key():
    try:
        connect("x").models.list()
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key", error
    else:
        raise SystemExit("let in without a key")


for part in (text, tools_that_are_offered, tools_that_are_asked_for, no_key):
    part()
print("passed with openai", openai.__version__)
