# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What a folder must hold to be served, on a small model that is broken in one place at a time."""

import json
import struct

import model_content as module
import pytest
from ansible.module_utils.sglang_kit import model_content
from ansible.module_utils.testing import patch_module_args

ARCHITECTURE = "KimiK25ForConditionalGeneration"
FIRST, SECOND = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
INDEX = "model.safetensors.index.json"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


def weights(tensors, tail=b""):
    """Return a safetensors file, given {name: (dtype, shape, start, stop)}."""
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        for name, (dtype, shape, start, stop) in tensors.items()
    }
    head = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    size = max(stop for *_, stop in tensors.values())
    return struct.pack("<Q", len(head)) + head + b"\0" * size + tail


ONE = {"a": ("BF16", [2, 3], 0, 12), "b": ("U8", [4], 12, 16), "s": ("F32", [], 16, 20)}
TWO = {"c": ("F8_E4M3", [8], 0, 8)}
MODEL = {
    "config.json": json.dumps(
        {"architectures": [ARCHITECTURE], "auto_map": {"AutoConfig": "configuration_kimi.KimiConfig"}}
    ),
    "hf_quant_config.json": json.dumps({"quantization": {"quant_algo": "NVFP4"}}),
    "configuration_kimi.py": "",
    "tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_kimi.Kimi", None]}}),
    "tokenization_kimi.py": "",
    "tiktoken.model": "IQ== 0\n",
    "chat_template.jinja": TEMPLATE,
    INDEX: json.dumps({"weight_map": {"a": FIRST, "b": FIRST, "s": FIRST, "c": SECOND}}),
    FIRST: weights(ONE),
    SECOND: weights(TWO),
}


@pytest.fixture
def look(tmp_path, capsys):
    """Return a function that runs the module on the model with some files in place of others."""

    def run(arguments=None, **files):
        for name, content in {**MODEL, **files.pop("others", {})}.items():
            if content is not None:
                data = content if isinstance(content, bytes) else content.encode()
                (tmp_path / name).write_bytes(data)
        defaults = {"path": str(tmp_path), "architecture": ARCHITECTURE, "quantizations": ["NVFP4"]}
        with patch_module_args({**defaults, **(arguments or {})}), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out)

    return run


def test_whole_model_has_no_problems(look):
    result = look()
    assert result["problems"] == []
    assert (result["architecture"], result["quantization"], result["template"]) == (
        ARCHITECTURE,
        "NVFP4",
        "renders",
    )
    assert result["weights"] == {"tensors": 4, "files": 2, "bytes": 28}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, ["config.json cannot be read: [Errno 2]"]),
        ("config.json", "{", ["config.json cannot be read: Expecting"]),
        ("config.json", "[]", ["config.json is no JSON object"]),
        (
            "config.json",
            '{"architectures": ["LlamaForCausalLM"]}',
            [f"names the architecture LlamaForCausalLM, expected {ARCHITECTURE}"],
        ),
        ("hf_quant_config.json", None, ["quantisation is none, expected NVFP4"]),
        (
            "hf_quant_config.json",
            '{"quantization": {"quant_algo": "FP8"}}',
            ["quantisation is FP8, expected NVFP4"],
        ),
        ("configuration_kimi.py", None, ["configuration_kimi.py is not there, where the configuration says"]),
        ("tokenization_kimi.py", None, ["tokenization_kimi.py is not there, where the configuration says"]),
        ("tiktoken.model", None, ["there is no vocabulary, expected one of tokenizer.json, tiktoken.model"]),
        ("chat_template.jinja", None, ["there is no chat template, expected chat_template.jinja or one in"]),
        ("chat_template.jinja", "{% for %}", ["the chat template does not render: TemplateSyntaxError"]),
        ("chat_template.jinja", "{{ raise_exception('no') }}", ["does not render: TemplateError: no"]),
        ("chat_template.jinja", "hello", ["the chat template loses what the user says"]),
        (SECOND, None, ["1 of 4 tensors", f"first c: it says {SECOND}, found in no file"]),
        (SECOND, b"\0" * 7, ["7 bytes, too short for a header", "first c"]),
        (SECOND, b"\xff" * 9, ["the header would be 18446744073709551615 bytes long, in a file of 9"]),
        (SECOND, struct.pack("<Q", 2) + b"{{", ["the header is no JSON"]),
        (SECOND, weights(TWO)[:-1], ["the tensors end at byte 8 of 7"]),
        (SECOND, weights(TWO, b"x"), ["the tensors end at byte 8 of 9"]),
        (SECOND, weights({"c": ("U8", [8], 2, 10)}), ["c is 2 bytes behind the start"]),
        (
            SECOND,
            weights({"c": ("U8", [8], 0, 8), "d": ("U8", [8], 4, 12)}),
            ["d overlaps c"],
        ),
        (SECOND, weights({"c": ("BF16", [8], 0, 8)}), ["c takes 8 bytes, and its shape and type 16"]),
        (SECOND, weights({"b": ("U8", [8], 0, 8)}), [f"b is in {FIRST} and in {SECOND}"]),
        (INDEX, None, [f"2 weight files, and no {INDEX}"]),
        (INDEX, "{}", [f"{INDEX} cannot be used"]),
    ],
)
def test_what_is_broken_is_named(look, name, content, says):
    text = "\n".join(look(others={name: content})["problems"])
    for part in says:
        assert part in text


def test_drafter_needs_no_tokenizer_and_no_index(look):
    gone = dict.fromkeys(
        [
            "tiktoken.model",
            "tokenizer_config.json",
            "tokenization_kimi.py",
            "chat_template.jinja",
            INDEX,
            SECOND,
        ]
    )
    result = look({"tokenizer": False, "quantizations": []}, others=gone)
    assert (result["problems"], result["template"]) == ([], None)


def test_weights_that_the_index_does_not_name_are_left_alone(look):
    result = look(others={"consolidated.safetensors": b"", "extra.safetensors": MODEL[FIRST]})
    assert (result["problems"], result["weights"]["files"]) == ([], 2)


def test_folder_without_weights_or_without_itself(look, tmp_path):
    result = look(others=dict.fromkeys([FIRST, SECOND]))
    assert any("has no safetensors file, expected the weights there" in text for text in result["problems"])
    assert "Expected the folder of a model" in look({"path": str(tmp_path / "none")})["msg"]


def test_template_of_the_tokenizer_is_taken_where_there_is_no_file(look):
    named = [{"name": "tool_use", "template": "{% x %}"}, {"name": "default", "template": TEMPLATE}]
    for stated in (TEMPLATE, named):
        settings = json.dumps({"chat_template": stated})
        result = look(others={"chat_template.jinja": None, "tokenizer_config.json": settings})
        assert (result["problems"], result["template"]) == ([], "renders")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        (
            {"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}},
            "compressed-tensors",
        ),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "NVFP4"),
        ({}, "none"),
    ],
)
def test_quantisation_is_read_from_wherever_it_is_stated(tmp_path, config, says):
    assert model_content.quantization(str(tmp_path), config) == says
