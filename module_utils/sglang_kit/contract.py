# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""The contract between EAGLE-3 and a target model, read from the sources of a staged SGLang release."""

from __future__ import annotations

import ast
import re

from .contract_calls import find_sites
from .contract_forward import check_forward
from .contract_tree import ContractError, Tree
from .contract_wrapper import ModelClass
from .releases_facts import FIRST_RELEASE

# Every release asks a target for these two kinds of thing. If a tree seems to ask for neither, it is the
# audit that did not see it, and that must not pass for an answer.
ASKED = {
    "the capture of hidden states": re.compile(r"^set_eagle\w*|^set_\w*(aux_hidden|layers_to_capture)"),
    "the embedding and the head": re.compile(r"embed"),
}


def find_class(tree, class_name, file=None):
    """Return the ModelClass `class_name`, in `file` (below the package) or wherever srt/models defines it."""
    if file is not None:
        if file not in tree.texts:
            raise ContractError(f"{tree.root} has no {file}")
        files = [file]
    else:
        files = tree.class_files(class_name)
    found = [
        name for name in files if isinstance(tree.module(name).definitions.get(class_name), ast.ClassDef)
    ]
    if len(found) != 1:
        if found:
            what = "defined in " + " and in ".join(found) + ". Say which file is meant."
        else:
            first = FIRST_RELEASE.get(class_name)
            what = "not defined under srt/models. " + (
                f"Take SGLang {first} or later: it is the first that has the class."
                if first
                else "Check the name of the architecture, or take a release that knows it."
            )
        raise ContractError(f"{class_name} in {tree.root}: {what}")
    module = tree.module(found[0])
    return ModelClass(tree, module, module.definitions[class_name])


def audit(path, class_name, file=None):
    """Audit one model class in the tree at `path`. See audit_class for what is returned."""
    tree = Tree(path)
    return audit_class(tree, find_sites(tree), class_name, file)


def audit_class(tree, sites, class_name, file=None):
    """Audit one model class against the Sites of a Tree.

    Returns a dict: ``version``, ``package``, ``model`` (file:line), ``verdict`` (satisfied, missing,
    not_understood), the lists ``satisfied``, ``missing``, ``optional``, ``not_understood`` of entries
    ``{"name", "file", "line", "guard", "why", "where"}``, and ``forward_path`` (see check_forward).
    ``setter`` is the name under which the tree asks for the capture of hidden states; ``tree``, ``wrapper``
    and ``sites`` are the objects behind it. Raises ContractError where there is nothing to audit.
    """
    wrapper = find_class(tree, class_name, file)
    lists = {"satisfied": [], "missing": [], "optional": [], "not_understood": []}
    for site in sites:
        status, entry = judge(wrapper, site)
        lists[status].append(entry)
    for what, pattern in ASKED.items():
        if not any(site.required and site.name and pattern.search(site.name) for site in sites):
            why = f"no place was found where this release asks the target for {what}"
            lists["not_understood"].append(_entry(None, "srt", 0, None, why, None))
    setter = setter_name(sites)
    forward = check_forward(wrapper, setter)
    for step in forward:
        if not step["ok"]:
            status = "not_understood" if step["ok"] is None else "missing"
            file_name, _colon, line = step["where"].rpartition(":")
            why = "could not follow: %s" if step["ok"] is None else "not found: %s"
            lists[status].append(_entry(None, file_name, int(line), None, why % step["what"], step["where"]))
    verdict = "missing" if lists["missing"] else "not_understood" if lists["not_understood"] else "satisfied"
    return dict(
        lists,
        version=tree.version(),
        package=tree.root,
        model=f"{wrapper.module.name}:{wrapper.node.lineno}",
        verdict=verdict,
        forward_path=forward,
        tree=tree,
        wrapper=wrapper,
        sites=sites,
        setter=setter,
    )


def setter_name(sites):
    """Return the name under which a tree asks for the capture of hidden states."""
    names = [
        s.name
        for s in sites
        if s.required and s.name and ASKED["the capture of hidden states"].search(s.name)
    ]
    return names[0] if names else "set_eagle3_layers_to_capture"


def judge(wrapper, site):
    """Return ``(list, entry)`` for one Site: which of the four lists it belongs to, and the evidence."""
    # Whatever a strange place asks, there is no harm in it if the model has that.
    if site.why is not None and (site.name is None or _lacks(wrapper, site.name, None) is not None):
        return "not_understood" if site.required else "optional", _site_entry(site, site.why, None)
    names = [site.name, *site.alternatives]
    problems = [_lacks(wrapper, name, site.call) for name in names]
    good = next((name for name, problem in zip(names, problems) if problem is None), None)
    if good is not None:
        member = wrapper.get(good)
        status = "satisfied" if site.required else "optional"
        return status, _site_entry(site, f"{wrapper.name} has it ({member.kind})", member.place)
    status, why = problems[0]
    if not site.required:
        return "optional", _site_entry(site, why, None)
    if status == "missing" and not site.certain:
        return "not_understood", _site_entry(site, why + ", and the object asked may be the drafter", None)
    return status, _site_entry(site, why, None)


def _lacks(wrapper, name, call):
    """Return None if `wrapper` has `name` in a usable form, else ``(missing or not_understood, why)``."""
    member = wrapper.get(name)
    if member is None:
        unsure = wrapper.why_unsure()
        if unsure is not None:
            return "not_understood", f"{wrapper.name} has no {name} of its own, but {unsure}"
        return "missing", f"{wrapper.name} has no {name}"
    if wrapper.is_stub(name):
        return "missing", f"{wrapper.name}.{name} only raises NotImplementedError ({member.place})"
    misfit = wrapper.misfit(name, call)
    if misfit is not None:
        return "missing", f"{wrapper.name}.{name} ({member.place}) {misfit}"
    step = wrapper.delegate_of(name)
    if (
        step is not None
        and step[2] is not None
        and step[2].get(step[1]) is None
        and step[2].why_unsure() is None
    ):
        return (
            "missing",
            f"{wrapper.name}.{name} hands on to self.{step[0]}, and {step[2].name} has no {step[1]}",
        )
    return None


def _site_entry(site, why, where):
    return _entry(site.name, site.file, site.line, site.guard, why, where)


def _entry(name, file, line, guard, why, where):
    return {"name": name, "file": file, "line": line, "guard": guard, "why": why, "where": where}


def explain(result):
    """Return one sentence or two for each thing in an audit's result that must stop a deploy; [] if there is
    none.

    `result` holds the lists of audit() and ``findings``, those of check_drafter.
    """
    model = "{}, SGLang {}".format(result["model"], result["version"] or "of unknown version")
    problems = []
    by_cause = {}
    for entry in result["missing"]:
        by_cause.setdefault((entry["name"], entry["why"]), []).append(
            "{}:{}".format(entry["file"], entry["line"])
        )
    for (name, why), places in by_cause.items():
        asked = "asked for at" if name else "see"
        remedy = (
            "Patch the class with the sglang_patch role, or take SGLang 0.5.10 or later"
            if name
            else ("Take a release that the matrix has proved")
        )
        problems.append("{} ({}); {} {}. {}.".format(why, model, asked, ", ".join(places), remedy))
    for entry in result["not_understood"]:
        problems.append(
            "not understood at {}:{}: {} ({}). Read that place; if EAGLE-3 is served without it, report it, "
            "and pin a "
            "release that the matrix has proved.".format(entry["file"], entry["line"], entry["why"], model)
        )
    for finding in result["findings"]:
        if finding["severity"] == "error":
            problems.append("{}: {}. Remedy: {}.".format(finding["what"], finding["why"], finding["remedy"]))
    return problems
