# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint, as its generator's command line writes it."""

import json
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]


def generate(out, *arguments):
    script = ROOT / "lab" / "checkpoint" / "make_checkpoint.py"
    subprocess.run([sys.executable, str(script), str(out), *arguments], check=True, timeout=60)
    return out


@pytest.fixture(scope="module", params=["random", "echo", "cycle"])
def checkpoint(request, tmp_path_factory):
    out = generate(tmp_path_factory.mktemp(request.param), "--mode", request.param)
    return request.param, out


def load_json(path):
    return json.loads(path.read_text())


def load(folder):
    """Return {name: array} of every safetensors file in the folder; bfloat16 as float32."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            if tensor["dtype"] == "BF16":
                bits = np.frombuffer(tensor["data"], "<u2").astype(np.uint32) << 16
                array = bits.view(np.float32)
            else:
                array = np.frombuffer(
                    tensor["data"], {"F32": "<f4", "I64": "<i8", "BOOL": "bool"}[tensor["dtype"]]
                )
            tensors[name] = array.reshape(tensor["shape"])
    return tensors


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def most_likely(head, embedding):
    """Return the token that the head gives to each embedding behind an RMS norm: [vocab]."""
    states = embedding / np.sqrt((embedding**2).mean(axis=1, keepdims=True))
    return (states @ head.T).argmax(axis=1)


def test_same_arguments_give_the_same_bytes(checkpoint, tmp_path):
    mode, out = checkpoint
    assert contents(generate(tmp_path, "--mode", mode)) == contents(out)


def test_another_seed_gives_other_weights_and_the_same_config(checkpoint, tmp_path):
    mode, out = checkpoint
    other, mine = contents(generate(tmp_path, "--mode", mode, "--seed", "7")), contents(out)
    differing = {name for name in mine if other[name] != mine[name]}
    assert differing == {name for name in mine if name.endswith(".safetensors")}


def test_index_names_every_tensor_and_its_shard(checkpoint):
    target = checkpoint[1] / "target"
    index = load_json(target / "model.safetensors.index.json")
    held, total = {}, 0
    for path in target.glob("*.safetensors"):
        blob = path.read_bytes()
        header = json.loads(blob[8 : 8 + struct.unpack("<Q", blob[:8])[0]])
        assert header.pop("__metadata__") == {"format": "pt"}
        held.update(dict.fromkeys(header, path.name))
        total += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": held}
    assert sorted(set(held.values())) == [f"model-{n:05d}-of-000004.safetensors" for n in (1, 2, 3, 4)]


def test_files_are_readable_by_others(checkpoint):
    unreadable = [path for path in checkpoint[1].rglob("*") if not path.stat().st_mode & 0o004]
    assert unreadable == []


def test_weights_have_the_shapes_that_the_config_states(checkpoint):
    target = checkpoint[1] / "target"
    text = load_json(target / "config.json")["text_config"]
    tensors = load(target)
    layer = f"language_model.model.layers.{text['num_hidden_layers'] - 1}."
    assert tensors["language_model.lm_head.weight"].shape == (text["vocab_size"], text["hidden_size"])
    assert tensors[layer + "mlp.gate.weight"].shape == (text["n_routed_experts"], text["hidden_size"])
    assert tensors[layer + "self_attn.kv_b_proj.weight"].shape == (
        text["num_attention_heads"] * (text["qk_nope_head_dim"] + text["v_head_dim"]),
        text["kv_lora_rank"],
    )
    assert f"language_model.model.layers.{text['num_hidden_layers']}.input_layernorm.weight" not in tensors


def test_drafter_fits_the_target(checkpoint):
    out = checkpoint[1]
    target, drafter = load_json(out / "target" / "config.json"), load_json(out / "draft" / "config.json")
    text = target["text_config"]
    assert drafter["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (drafter["vocab_size"], drafter["target_hidden_size"]) == (text["vocab_size"], text["hidden_size"])
    aux = drafter["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert len(aux) == 3
    assert max(aux) < text["num_hidden_layers"]
    tensors = load(out / "draft")
    target_ids = np.arange(drafter["draft_vocab_size"]) + tensors["d2t"]
    assert np.array_equal(np.flatnonzero(tensors["t2d"]), target_ids)


def test_tokenizer_round_trips_text_and_ends_with_the_special_tokens(checkpoint):
    target = checkpoint[1] / "target"
    config = load_json(target / "config.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
    text = "Grüße, 世界!\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"]
    assert tokenizer.token_to_id("[PAD]") == config["pad_token_id"] == tokenizer.get_vocab_size() - 1


@pytest.mark.parametrize(
    ("mode", "prompt_end", "following"),
    [
        ("echo", "a", "aaaa"),
        ("cycle", "a", "bcde"),
        ("cycle", "~", '!"#$'),
        ("echo", "<|im_middle|>", "!!!!"),
    ],
)
def test_quiet_target_says_what_its_mode_promises(mode, prompt_end, following, tmp_path):
    generate(tmp_path, "--mode", mode)
    tensors = load(tmp_path / "target")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "target" / "tokenizer.json"))
    to_residual = [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert to_residual
    assert not any(tensors[name].any() for name in to_residual), "a block writes to the residual stream"
    says = most_likely(
        tensors["language_model.lm_head.weight"], tensors["language_model.model.embed_tokens.weight"]
    )
    token, said = tokenizer.token_to_id(prompt_end), []
    for _ in following:
        token = says[token]
        said.append(int(token))
    assert tokenizer.decode(said) == following


@pytest.mark.parametrize(("mode", "right_drafts"), [("echo", 3), ("cycle", 1)])
def test_drafter_is_right_as_often_as_its_mode_promises(mode, right_drafts, tmp_path):
    generate(tmp_path, "--mode", mode)
    target, drafter = load(tmp_path / "target"), load(tmp_path / "draft")
    embedding = target["language_model.model.embed_tokens.weight"]
    says = most_likely(target["language_model.lm_head.weight"], embedding)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "target" / "tokenizer.json"))
    before = tokenizer.token_to_id("a")
    # Every draft step sees the same state: the embedding of the token before the verified one.
    state = np.tile(embedding[before], 3) @ drafter["fc.weight"].T
    drafted = int((drafter["lm_head.weight"] @ state).argmax())
    drafted += int(drafter["d2t"][drafted])
    wanted, token = [], says[before]
    for _ in range(3):
        token = says[token]
        wanted.append(int(token))
    assert [drafted == token for token in wanted] == [True] * right_drafts + [False] * (3 - right_drafts)


def test_vocabulary_too_small_is_refused_with_the_number_needed(tmp_path):
    script = ROOT / "lab" / "checkpoint" / "make_checkpoint.py"
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "--vocab", "270"], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "vocab is 270; the bytes and special tokens need 280" in run.stderr
