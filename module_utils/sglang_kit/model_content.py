# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""What must be in a model's folder for an engine to serve it: configuration, tokenizer, chat template."""

from __future__ import annotations

import json
import os

VOCABULARIES = ("tokenizer.json", "tiktoken.model", "tokenizer.model")
TEMPLATE = "chat_template.jinja"
HELLO = [{"role": "user", "content": "Hello"}]


class Wrong(Exception):
    """Says what is wrong with a file."""


def load(folder, name):
    """Return the parsed JSON object of a file; raise Wrong."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as content:
            found = json.load(content)
    except (OSError, ValueError) as error:
        raise Wrong(f"{name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise Wrong(f"{name} is no JSON object")
    return found


def quantization(folder, config):
    """Return what a checkpoint says of its quantisation, such as NVFP4 or compressed-tensors; "none"."""
    if os.path.exists(os.path.join(folder, "hf_quant_config.json")):
        stated = load(folder, "hf_quant_config.json").get("quantization") or {}
    else:
        stated = config.get("quantization_config") or (config.get("text_config") or {}).get(
            "quantization_config"
        )
    stated = stated or {}
    return stated.get("quant_algo") or stated.get("quant_method") or "none"


def remote_code(*configs):
    """Return the names of the Python files that the configurations lead to."""
    found = set()
    for config in configs:
        for target in (config.get("auto_map") or {}).values():
            for one in target if isinstance(target, list) else [target]:
                # A name with another repository in front is not a file of this one.
                if one and "--" not in one:
                    found.add(one.rpartition(".")[0].replace(".", "/") + ".py")
    return sorted(found)


def template(folder, tokenizer):
    """Return the text of the chat template; None if there is none."""
    path = os.path.join(folder, TEMPLATE)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as content:
            return content.read()
    stated = tokenizer.get("chat_template")
    if isinstance(stated, list):
        stated = {one.get("name"): one.get("template") for one in stated}.get("default")
    return stated


def render(text, tokenizer):
    """Return what the template makes of a greeting; None where Jinja is not installed. Raises Wrong."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        return None

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    class Generation(jinja2.ext.Extension):
        """The tag with which templates mark an answer for training; it adds nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def token(name):
        stated = tokenizer.get(name)
        return stated.get("content") if isinstance(stated, dict) else stated

    # As the engine's tokenizers set it up.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: form
    try:
        return environment.from_string(text).render(
            messages=HELLO,
            add_generation_prompt=True,
            bos_token=token("bos_token"),
            eos_token=token("eos_token"),
        )
    except Exception as error:
        raise Wrong(f"the chat template does not render: {type(error).__name__}: {error}") from error


def examine(folder, architecture, quantizations, tokenizer):
    """Return (a sentence for each problem, {architecture, quantization, template}).

    architecture, quantizations: what is expected, None for anything
    tokenizer: whether a tokenizer and a chat template are expected
    template: "renders", "not rendered" without Jinja, or None
    """
    found, facts = [], {"architecture": None, "quantization": None, "template": None}
    try:
        config = load(folder, "config.json")
        facts["architecture"] = ", ".join(config.get("architectures") or []) or None
        if architecture and facts["architecture"] != architecture:
            found.append(
                f"config.json names the architecture {facts['architecture']}, expected {architecture}"
            )
        facts["quantization"] = quantization(folder, config)
        if quantizations and facts["quantization"] not in quantizations:
            expected = " or ".join(quantizations)
            found.append(f"the checkpoint's quantisation is {facts['quantization']}, expected {expected}")
    except Wrong as error:
        found.append(str(error))
        config = {}
    settings = {}
    if tokenizer:
        try:
            settings = load(folder, "tokenizer_config.json")
        except Wrong as error:
            found.append(str(error))
        if not any(os.path.exists(os.path.join(folder, name)) for name in VOCABULARIES):
            found.append(f"there is no vocabulary, expected one of {', '.join(VOCABULARIES)}")
        found += _template(folder, settings, facts)
    found += [
        f"{name} is not there, where the configuration says that its code is"
        for name in remote_code(config, settings)
        if not os.path.exists(os.path.join(folder, name))
    ]
    return found, facts


def _template(folder, settings, facts):
    text = template(folder, settings)
    if not text:
        return [f"there is no chat template, expected {TEMPLATE} or one in tokenizer_config.json"]
    try:
        rendered = render(text, settings)
    except Wrong as error:
        return [str(error)]
    facts["template"] = "not rendered" if rendered is None else "renders"
    if rendered is not None and HELLO[0]["content"] not in rendered:
        return ["the chat template loses what the user says"]
    return []
