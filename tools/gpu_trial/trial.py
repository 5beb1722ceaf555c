#!/usr/bin/env python3
# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Prove the patch, the launcher, the log reader, the diagnoses and the gate on real GPUs.

Runs beside an unpacked bundle on a Linux machine with CUDA, its own torch, and no network. Writes trial.json,
trial.md and logs.tar.xz to a folder. Exit status 0 only if every case was run and came out as it must.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys
import tarfile
import threading
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
KIT = HERE / "kit"
sys.path[:0] = [str(HERE), str(KIT)]

import yaml
from ansible.module_utils.sglang_kit.diagnoses import diagnose
from ansible.module_utils.sglang_kit.probe_http import Server
from ansible.module_utils.sglang_kit.startup_log import StartupLog, split_record
from cases import WAVES
from checkpoints import make_all
from load import begin_checkpoint, measure_load
from report import markdown
from server import (
    ARGUMENTS,
    SETTINGS,
    SPECULATION,
    Start,
    configuration,
    environment,
    install_launcher,
    schedulers,
    write_release,
)
from tree import (
    Patch,
    TrialError,
    copy_tree,
    make_tree,
    patch_again,
    patch_problems,
    prove_patch,
    run_module,
)
from vacancy import prove_vacancy

FIRST_PORT = 31000
NAMES = [case.name for wave in WAVES for case in wave]
# A cold start with graphs on a busy machine; what is slower is a finding.
LONGEST_START_S = 280
LONGEST_END_S = 40
MEASURED_TOKENS = 512
# Time that a wave needs to be worth beginning.
SHORTEST_WAVE_S = 90


def names(text):
    """Return the names of cases in an option's text; ArgumentTypeError for one that is none."""
    wanted = text.split(",")
    unknown = sorted(set(wanted) - set(NAMES))
    if unknown:
        raise argparse.ArgumentTypeError(f"no such case: {', '.join(unknown)}. There are {', '.join(NAMES)}")
    return wanted


def load_yaml(*parts):
    """Return one of the project's data files."""
    return yaml.safe_load(KIT.joinpath(*parts).read_text(encoding="utf-8"))


def machine():
    """Return what the machine is, as its own tools say, without the project's modules (dict)."""
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "gpus": [
            {"name": p.name, "memory_mib": p.total_memory >> 20, "capability": f"{p.major}.{p.minor}"}
            for p in properties
        ],
    }


def compare_facts(facts, known):
    """Return in what gpu_facts and torch differ (list of str)."""
    gpus, problems = facts["gpus"], []
    if len(gpus) != len(known["gpus"]):
        return [f"gpu_facts sees {len(gpus)} GPUs, torch {len(known['gpus'])}"]
    for mine, other in zip(gpus, known["gpus"]):
        if mine["name"] != other["name"] or mine["compute_capability"] != other["capability"]:
            problems.append("GPU {index}: {name}, {compute_capability}".format(**mine) + f", torch: {other}")
        # torch leaves out what the driver keeps for itself.
        if not 0.95 <= other["memory_mib"] / mine["memory_total_mib"] <= 1.0:
            problems.append("GPU {index}: {memory_total_mib} MiB".format(**mine) + f", torch: {other}")
    if not facts["driver"]["module_version"]:
        problems.append("gpu_facts found no driver")
    return problems


def gpu_facts():
    """Run the module gpu_facts; return its facts."""
    result = run_module(
        "gpu_facts", {"ports": [FIRST_PORT], "disks": [str(HERE)], "interpreters": [sys.executable]}
    )
    if "facts" not in result:
        raise TrialError("gpu_facts failed: {}".format(result.get("msg")))
    return result["facts"]


def hold(port):
    """Listen on a port; return the socket."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", port))
    sock.listen(1)
    return sock


class Trial:
    """Everything that the cases share."""

    def __init__(self, out, work, gpus, deadline):
        self.out, self.work, self.gpus, self.deadline = out, work, gpus, deadline
        self.logs = work / "logs"
        self.logs.mkdir(parents=True)
        self.env = environment(work)
        self.launcher = install_launcher(work / "launcher")
        sys.path.insert(0, str(self.launcher.parent))
        import launcher

        self.launcher_module = launcher
        self.lines_class = launcher.Lines
        self.diagnoses = load_yaml("roles", "sglang_gate", "vars", "main", "diagnoses.yml")[
            "__sglang_gate_diagnoses"
        ]
        gate = load_yaml("roles", "sglang_gate", "vars", "main", "prompts.yml")
        self.native_format = gate["__sglang_gate_kimi_format"]
        self.band = gate["__sglang_gate_bands"][SPECULATION["speculative-num-steps"]]
        self.prompts = load_yaml("roles", "sglang_gate", "vars", "main", "main.yml")[
            "__sglang_gate_profiles"
        ]["cpu"]["prompts"]
        self.trees, self.checkpoints = {}, {}
        # By case, set once its start is up or dead; and one is measured at a time.
        self.at_rest = collections.defaultdict(threading.Event)
        self.measuring = threading.Lock()
        self.serving_facts = None

    def left(self):
        """Return the seconds that are left."""
        return self.deadline - time.monotonic()

    def arguments(self, release, port, speculate):
        """Return the arguments of a release (dict)."""
        arguments = dict(ARGUMENTS, port=port)
        arguments.update({"tp-size": self.gpus, "model-path": str(release / "model")})
        if speculate:
            arguments.update(SPECULATION, **{"speculative-draft-model-path": str(release / "drafter")})
        return arguments

    def start(self, case, port):
        """Start a case's release."""
        launcher = self.launcher if case.launcher else None
        return self.start_release(case.name, port, case.speculate, case.tree, case.checkpoint, launcher)

    def start_release(self, name, port, speculate, tree, checkpoint, launcher):
        """Lay out a release of this name and start it, by a launcher or (None) by the engine alone."""
        release = self.work / "releases" / name
        arguments = self.arguments(release, port, speculate)
        write_release(release, self.trees[tree], self.checkpoints[checkpoint], arguments)
        log_path = self.logs / (name + ".log")
        return Start(release, port, self.env, log_path, launcher, StartupLog, self.lines_class)

    def run_case(self, case, port):
        """Run a case from start to end; return its result (dict)."""
        holder = hold(port) if case.port_holder == "before" else None
        start = self.start(case, port)
        result = {"name": case.name, "what": case.what, "by": "launcher" if case.launcher else "engine"}
        try:
            if case.port_holder == "loading":
                if not start.wait(lambda: start.log.phase != "starting" or start.ended(), LONGEST_START_S):
                    raise TrialError("nothing was loaded")
                holder = hold(port)
            start.wait(lambda: start.ended() or start.answers(Server), min(LONGEST_START_S, self.left()))
            result["came_up_s"] = start.answers_at and round(start.answers_at, 1)
            self.at_rest[case.name].set()
            if start.answers_at is not None:
                self.serve(case, start, result)
                self.end(case, start, result)
            elif not start.ended():
                result["hung_in"] = start.log.describe()
        finally:
            start.clean_up()
            if holder:
                holder.close()
        return self.judge(case, start, result)

    def serve(self, case, start, result):
        """Ask the server that is up; measure it when no engine beside it starts or is measured."""
        arguments = {
            "url": f"http://127.0.0.1:{start.port}",
            "model": ARGUMENTS["served-model-name"],
            "prompts": self.prompts,
            "sensible": False,
            "native_format": self.native_format,
            "band": self.band,
        }
        run_module("sglang_acceptance", arguments)
        for other in list(self.at_rest.values()):
            other.wait(max(0, self.left()))
        # The second time nothing compiles any more. Longer answers make the rate worth comparing.
        arguments["prompts"] = [dict(prompt, max_tokens=MEASURED_TOKENS) for prompt in self.prompts]
        with self.measuring:
            proof = run_module("sglang_acceptance", arguments)
        result["proof"] = {
            key: proof.get(key) for key in ("passed", "problems", "acceptance", "server", "msg")
        }
        if case.end == "kill":
            self.serving_facts = gpu_facts()

    def end(self, case, start, result):
        """End a server that is up."""
        begun = start.clock()
        if case.end == "kill":
            found = schedulers(start.process.pid)
            if not found:
                raise TrialError("no scheduler was found among the engine's processes")
            title = sorted(found)[-1]
            result["killed"] = title
            os.kill(found[title], 9)
        else:
            start.stop()
        if start.wait(start.ended, LONGEST_END_S):
            result["end_took_s"] = round(start.ended_at - begun, 1)
            # As systemd does with what is left in the unit's control group.
            start.clean_up()
            if all(event.is_set() for name, event in self.at_rest.items() if name != case.name):
                held = self.launcher_module.Launcher.wait_for_gpus()
                result["freed_s"] = None if held else round(start.clock() - begun, 1)

    def diagnose(self, start):
        """Return what the diagnoses say of a start that has ended (list of dict)."""
        lines = split_record(start.log_path.read_text(encoding="utf-8", errors="replace"))
        unit = {"result": "exit-code", "exit_status": start.status, "load_state": "loaded"}
        return diagnose(self.diagnoses, unit, lines, phase=start.log.phase)

    def judge(self, case, start, result):
        """Add what the project's parts say of the start, and what is not as it must be."""
        died = start.answers_at is None or case.end == "kill"
        found = self.diagnose(start) if died else []
        result.update(
            status=start.status,
            ended_s=start.ended_at and round(start.ended_at, 1),
            lost_s=start.lost_at and round(start.lost_at, 1),
            lost_line=start.log.lost,
            phase=start.log.phase,
            progress=start.log.progress,
            phases=[dict(step, at=round(step["at"], 1)) for step in start.log.history],
            told=[(round(at, 1), words) for at, words in start.systemd.said] if start.systemd else [],
            diagnoses=[{key: entry[key] for key in ("id", "cause", "remedy", "line")} for entry in found],
        )
        result["problems"] = self.problems(case, start, result)
        return result

    def problems(self, case, start, result):
        """Return what is not as the case says (list of str)."""
        problems, proof = [], result.get("proof")
        if case.serves != (start.answers_at is not None):
            problems.append("it serves" if proof else "it does not serve")
        first = result["diagnoses"][0]["id"] if result["diagnoses"] else None
        if case.diagnoses and first not in case.diagnoses:
            problems.append(f"diagnosed as {first}")
        if "hung_in" in result:
            problems.append("neither up nor dead: {hung_in}".format(**result))
        if proof and proof["passed"] is not case.passes:
            problems.append("the gate says {passed}: {problems}".format(**proof))
        if proof and case.length:
            length = (proof["acceptance"] or {}).get("length")
            if length is None or not case.length[0] <= length <= case.length[1]:
                problems.append(f"acceptance length {length}")
        if proof and case.end == "stop" and case.launcher and start.status != 0:
            problems.append(f"stopped with status {start.status}")
        if proof and start.log.phase not in ("serving", "draining"):
            problems.append(f"the log reader says {start.log.phase}")
        return problems


def run_wave(trial, wave, first_port):
    """Run the cases of a wave side by side; return their results in its order."""
    results = {}
    # A launcher of this wave would take the last one's memory for that of a stranger.
    trial.launcher_module.Launcher.wait_for_gpus()
    for case in wave:
        trial.at_rest[case.name].clear()

    def run(case, port):
        try:
            results[case.name] = trial.run_case(case, port)
        except Exception as error:
            traceback.print_exc()
            results[case.name] = {
                "name": case.name,
                "what": case.what,
                "problems": [f"{type(error).__name__}: {error}"],
            }
        finally:
            trial.at_rest[case.name].set()
        found = results[case.name]
        print(f"{case.name}: {found['problems'] or 'as it must be'}", flush=True)

    threads = [
        threading.Thread(target=run, args=(case, first_port + 10 * number))
        for number, case in enumerate(wave)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[case.name] for case in wave]


def prove_tree(trial, report):
    """Make the engine trees, and prove patch and audit on them; returns the Patch."""
    tree = trial.work / "engine"
    make_tree(HERE / "site", tree)
    patch = Patch(tree, load_yaml("roles", "sglang_patch", "defaults", "main.yml"))
    steps = report["patch"] = prove_patch(patch)
    trial.trees["without"] = trial.work / "engine_without"
    copy_tree(tree, trial.trees["without"])
    patch_again(patch, steps)
    trial.trees["patched"] = tree
    return patch


def prove_import(trial, patch, report):
    """Import the patched file, and hold all that was found of the patch against what it must be."""
    report["patch"]["import"] = patch.prove_import(trial.env)
    report["problems"] += patch_problems(patch, report["patch"])


def prove_drafters(trial, patch, report):
    """Make the checkpoints, and audit two of their drafters."""
    trial.checkpoints = make_all(trial.work / "checkpoints")
    for name, wanted in (("cycle", []), ("other_drafter", ["error"])):
        checkpoint = trial.checkpoints[name]
        found = patch.audit(checkpoint / "draft", checkpoint / "target")["findings"]
        report["patch"]["drafter_" + name] = found
        if sorted({entry.split(":")[0] for entry in found} & {"error"}) != wanted:
            report["problems"].append(f"the audit says of the drafter {name}: {found}")


def attest(patch):
    """Attest the patched tree, so that the launcher starts it; returns problems (list of str)."""
    wrapper = str((patch.package / "srt" / "models" / "kimi_k25.py").relative_to(patch.tree))
    result = run_module("engine_attestation", {"tree": str(patch.tree), "files": [wrapper]})
    return [] if result.get("changed") else ["the tree was not attested: {}".format(result.get("msg"))]


def check_arguments(trial, report):
    """Put the configuration, and one with a mistake, through the engine's own parser."""
    release = trial.work / "releases" / "any"
    good = trial.arguments(release, FIRST_PORT, speculate=True)
    answers = {}
    for name, arguments in (("good", good), ("bad", dict(good, **{"no-such-flag": 1}))):
        asked = {
            "python": str(trial.trees["patched"] / "bin" / "python"),
            "content": configuration(arguments),
        }
        result = run_module("sglang_args", dict(asked, environment=SETTINGS))
        faults = [entry for entry in result.get("findings", []) if entry["severity"] == "error"]
        answers[name] = {"verdict": result.get("verdict"), "errors": faults, "msg": result.get("msg")}
    report["arguments"] = answers
    if answers["good"]["verdict"] == "refused":
        raise TrialError("the engine does not accept the configuration: {}".format(answers["good"]))
    for name, wanted in (("good", "accepted"), ("bad", "refused")):
        if answers[name]["verdict"] != wanted:
            report["problems"].append(f"a {name} configuration was not {wanted}: {answers[name]}")


def import_check(trial):
    """Import the engine's server and scheduler, and run one of its kernels; TrialError if that fails."""
    program = HERE / "import_check.py"
    python = trial.work / "engine" / "bin" / "python"
    answer = subprocess.run(
        [str(python), str(program)], env=trial.env, capture_output=True, text=True, timeout=180
    )
    if answer.returncode:
        raise TrialError("the engine cannot be imported:\n" + answer.stderr[-3000:])
    return answer.stdout.strip().splitlines()[-1]


def prepare(trial, report):
    """Do all that comes before the first start; what is independent of each other side by side."""
    patch = prove_tree(trial, report)
    report["problems"] += attest(patch)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        engine = pool.submit(import_check, trial)
        jobs = [pool.submit(job, trial, patch, report) for job in (prove_import, prove_drafters)]
        jobs.append(pool.submit(check_arguments, trial, report))
    for job in jobs:
        job.result()
    report["engine"] = engine.result()


def run(trial, options, report):
    """Run everything; fills the report as it goes."""
    known = report["machine"] = machine()
    if len(known["gpus"]) < trial.gpus:
        raise TrialError(f"the machine has {len(known['gpus'])} GPUs, {trial.gpus} are wanted")
    report["facts"] = gpu_facts()
    report["problems"] += compare_facts(report["facts"], known)
    large = trial.work / "large"
    # Written beside all that follows: it takes one core a minute or two.
    writer = begin_checkpoint(large, options.load_gib) if options.load_gib else None
    prepare(trial, report)
    print(f"prepared, {trial.left():.0f} s left; {report['engine']}", flush=True)
    report["vacancy"], problems = prove_vacancy(trial)
    report["problems"] += problems
    print(f"vacancy: {problems or 'as it must be'}, {trial.left():.0f} s left", flush=True)
    for number, every in enumerate(WAVES):
        wave = [case for case in every if case.name in options.cases]
        if not wave:
            continue
        if trial.left() < SHORTEST_WAVE_S:
            report["skipped"] += [case.name for case in wave]
            continue
        report["cases"] += run_wave(trial, wave, FIRST_PORT + 100 * number)
        print(f"wave {number + 1} done, {trial.left():.0f} s left", flush=True)
        if any(case.serves for case in wave) and not any(c.get("came_up_s") for c in report["cases"]):
            raise TrialError("nothing serves, so what follows would say nothing")
    report["serving_facts"] = trial.serving_facts and trial.serving_facts["gpus"]
    if options.load_gib:
        if writer.wait():
            raise TrialError("the large checkpoint could not be written")
        measure_load(trial, large, report)


def write_report(trial, report):
    """Write trial.json, trial.md and logs.tar.xz."""
    trial.out.mkdir(parents=True, exist_ok=True)
    (trial.out / "trial.json").write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    (trial.out / "trial.md").write_text(markdown(report), encoding="utf-8")
    with tarfile.open(trial.out / "logs.tar.xz", "w:xz") as archive:
        archive.add(trial.logs, "logs")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the results")
    parser.add_argument("--work", type=pathlib.Path, default=HERE / "work", help="folder for everything else")
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallel size of every start")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which no wave is begun")
    parser.add_argument("--cases", type=names, default=NAMES, help="names, with commas between; default: all")
    parser.add_argument("--load-gib", type=float, default=0, help="size of the checkpoint to load; 0: none")
    options = parser.parse_args()
    begun = time.monotonic()
    report = {
        "date": datetime.date.today().isoformat(),
        "tp": options.gpus,
        "cases": [],
        "skipped": [],
        "problems": [],
    }
    trial = Trial(options.out, options.work, options.gpus, begun + options.limit)
    try:
        run(trial, options, report)
    except TrialError as error:
        report["problems"].append(str(error))
    except Exception:
        # What was found before it is worth having.
        report["problems"].append(traceback.format_exc())
    report["seconds"] = round(time.monotonic() - begun)
    write_report(trial, report)
    print(markdown(report))
    good = report["cases"] and not report["problems"] and not report["skipped"]
    return 0 if good and not any(case["problems"] for case in report["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
