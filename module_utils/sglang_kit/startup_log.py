# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Read SGLang's start-up log: in which phase is the engine, and how far is it?

Works on the log of every release since 0.5.9, line by line, from a pipe or from the journal. Only the main
process and rank 0 are followed, or one rank of a host that has no rank 0; lines it does not know are passed
over. Standard library only: the launcher imports this file from its own folder on the node, Ansible's modules
import it as module_utils.
"""

from __future__ import annotations

import os
import re

PHASES = {
    "starting": "starting",
    "distributed": "initialising distributed",
    "loading_weights": "loading weights",
    "weights_loaded": "weights loaded",
    "kv_cache": "allocating the KV cache",
    "autotune": "tuning kernels",
    "graph_capture": "capturing graphs",
    "warm_up": "warming up",
    "serving": "serving",
    "draining": "draining",
}

# Seconds that a healthy engine may stay in a phase, or at one shard or batch of it, without any progress.
# Imports of a cold node and JIT compilation are silent for minutes; the engine's own warm-up limit is 600 s.
# Reading weights gets more where the files are large: see patience().
STALL_SECONDS = {
    "starting": 600,
    "distributed": 600,
    "loading_weights": 300,
    "weights_loaded": 600,
    "kv_cache": 600,
    "autotune": 1800,
    "graph_capture": 900,
    "warm_up": 660,
    # The log says so, but the health endpoint does not yet.
    "serving": 660,
}
# Bytes a second of the slowest storage that is worth waiting for. A shard shows only when it is read, and the
# engine reads this many of them at once.
SLOWEST_READ = 64 << 20
READERS = 8

# The launcher's own lines begin with this, and it writes ANSWERS once the server's health endpoint says 200.
LAUNCHER_PREFIX = "launcher: "
ANSWERS = "the server answers"

# Words with which the engine, or the launcher, says that a start cannot come to a good end any more. What
# follows can take the engine half a minute, so nobody should wait for it.
_LOST = re.compile(
    r"Scheduler hit an exception|Received sigquit from a child|SIGQUIT received\.|"
    r"(?:\w+Error: )?Rank \d+ scheduler (?:is dead|died)|Subprocess \S+ \(pid=\d+\) crashed with exit code|"
    r"Initialization failed\. warmup error|\[Errno \d+\] error while attempting to bind|"
    r"launcher: the engine's process \S+ \(pid \d+\) "
)
# "died during initialization (exit code: -9)", "crashed with exit code 1": how one of its processes ended.
_TOLD = re.compile(r"\bexit code:? (-?\d+)")
# What the main process says first. Which of several hosts of one server it is tells whether it has rank 0.
_NODE_RANK = re.compile(r"server_args=.*?\bnode_rank'?[=:] ?(\d+)")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
# A log line can be glued to the progress bar before it, so a record is also cut where a time stamp begins.
_GLUED = re.compile("(?=" + _STAMP + ")")
_PREFIX = re.compile(
    _STAMP + r"(?:[.,]\d+)?(?P<ranks>(?: [A-Z]+\d+)*)\]\s*"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s+(?:[\w.]+:\d+:\s*)?)?"
)
_BAR = re.compile(
    r"(?P<name>[^|]*?):?\s*(?P<percent>\d+)%\s*(?:Completed\s*\||\|[^|]*\|)\s*"
    r"(?P<done>\d+)/(?P<total>\d+)\s*\[(?P<elapsed>[\d:]+)<(?P<remaining>[\d:]+|\?)"
)
_LOAD_END = re.compile(r"Load weight end\..*?\btype=(?P<type>\w+)")
_GRAPH = re.compile(
    r"Capture\s+(?P<what>.*?)\s*(?:\b(?:cuda|cpu|npu)\s+)?graph\s+(?P<edge>begin|end)\b", re.IGNORECASE
)
# Matched at the beginning of a message, so that no request text in the log can be taken for a phase.
_MILESTONES = [
    (re.compile(pattern, re.IGNORECASE), phase)
    for pattern, phase in [
        (r"Init (?:torch distributed|parallel) begin", "distributed"),
        (r"Using KV cache dtype:", "kv_cache"),
        (r"[\w ()/-]{0,60}\bis allocated\. ", "kv_cache"),
        (r"Memory pool end\.", "kv_cache"),
        (r"Running FlashInfer autotune", "autotune"),
        (r"Waiting for application startup", "warm_up"),
        (r"Application startup complete", "warm_up"),
        (r"SIGTERM received\.", "draining"),
        (r"Gracefully exiting", "draining"),
    ]
]


def weights(folder):
    """Return {"files", "bytes", "largest_bytes"} of a model folder's weight files; zeros without any."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
        sizes = [os.path.getsize(os.path.join(folder, name)) for name in names]
    except OSError:
        sizes = []
    return {"files": len(sizes), "bytes": sum(sizes), "largest_bytes": max(sizes, default=0)}


def patience(largest_bytes, unseen_bytes=0):
    """Return STALL_SECONDS for a model whose largest weight file has that many bytes.

    unseen_bytes: what is read without a progress bar, on a host without rank 0.
    """
    silent = max(READERS * largest_bytes, unseen_bytes) / SLOWEST_READ
    return dict(STALL_SECONDS, loading_weights=max(STALL_SECONDS["loading_weights"], silent))


def told_status(line):
    """Return how a process ended, as the engine says: exit status, 128 + n for signal n, or None."""
    match = _TOLD.search(line)
    if not match:
        return None
    code = int(match.group(1))
    return 128 - code if code < 0 else code


def split_record(text):
    """Cut one record, or a piece of the raw stream, into its lines: list of str, no colours, none empty."""
    lines = []
    for part in re.split(r"[\r\n]+", _ANSI.sub("", text)):
        lines.extend(piece.rstrip() for piece in _GLUED.split(part))
    return [line for line in lines if line]


def split_prefix(line):
    """Take the time stamp off a line: (message, True if it comes from rank 0 or the main process)."""
    match = _PREFIX.match(line)
    if not match:
        return line, True
    ranks = [int(number) for number in re.findall(r"\d+", match.group("ranks"))]
    return line[match.end() :], not any(ranks)


def parse_bar(line):
    """Read a tqdm bar: dict of name, percent, done, total, elapsed_s, remaining_s (or None), else None."""
    match = _BAR.match(line)
    if not match:
        return None
    return {
        "name": match.group("name").strip(),
        "percent": int(match.group("percent")),
        "done": int(match.group("done")),
        "total": int(match.group("total")),
        "elapsed_s": _clock(match.group("elapsed")),
        "remaining_s": _clock(match.group("remaining")),
    }


def _clock(text):
    """Seconds of tqdm's [hours:]minutes:seconds, or None."""
    if not text or text == "?":
        return None
    seconds = 0
    for part in text.split(":"):
        seconds = seconds * 60 + int(part or 0)
    return seconds


class StartupLog:
    """The phase of one start of the engine, from its log lines in order.

    phase: a key of PHASES. part: "target" or "drafter", or None before any weights are loaded.
    bar: the newest progress bar of this phase (see parse_bar), or None.
    history: list of {"phase", "part", "at"}, one for each phase entered.
    progress: grows with every step forward, so that a caller can see that there was one.
    leads: whether this host has rank 0, which alone draws progress bars.
    lost: the first line, of any rank, that says that the start is lost; None as long as there is none.
    Times are whatever the caller passes as `at`, in seconds.
    """

    def __init__(self, at=None):
        self.phase = "starting"
        self.part = None
        self.bar = None
        self.progress = 0
        self.leads = True
        self.lost = None
        self.history = [{"phase": "starting", "part": None, "at": at}]
        self.last_progress_at = at
        self._rank = None
        self._loads_begun = 0
        self._fired_up = False
        self._listening = False

    def feed(self, text, at=None):
        """Take in one record (str); it may hold carriage returns and glued lines."""
        for line in split_record(text):
            self._line(line, at)

    def describe(self):
        """Return the phase in words: "loading weights 57/119 (48%)"."""
        text = PHASES[self.phase]
        if self.part == "drafter" and self.phase in ("loading_weights", "weights_loaded", "graph_capture"):
            text += " of the drafter" if self.phase != "weights_loaded" else " (drafter)"
        if self.bar:
            text += " {done}/{total} ({percent}%)".format(**self.bar)
        return text

    def _line(self, line, at):
        message, followed = split_prefix(line)
        if self.lost is None and _LOST.match(message):
            self.lost = message
        if line.startswith(LAUNCHER_PREFIX):
            if line[len(LAUNCHER_PREFIX) :].startswith(ANSWERS):
                self._enter("serving", self.part, at)
            return
        if message.startswith("server_args="):
            match = _NODE_RANK.match(message)
            self.leads = not match or int(match.group(1)) == 0
        if not (followed if self.leads else self._is_first_rank(line)):
            return
        bar = parse_bar(message)
        if bar:
            self._see_bar(bar, at)
        elif message.startswith("Load weight begin"):
            self._loads_begun += 1
            self._enter("loading_weights", "target" if self._loads_begun == 1 else "drafter", at)
        elif message.startswith("Load weight end"):
            match = _LOAD_END.match(message)
            drafter = bool(match) and ("eagle" in match.group("type").lower() or self._loads_begun > 1)
            self._enter("weights_loaded", "drafter" if drafter else "target", at)
        elif message.startswith("The server is fired up"):
            self._fired_up = True
            self._see_http(at)
        elif message.startswith("Uvicorn running on"):
            self._listening = True
            self._see_http(at)
        else:
            self._see_milestone(message, at)

    def _is_first_rank(self, line):
        """Whether a line is of the main process, or of the rank whose line came first."""
        match = _PREFIX.match(line)
        rank = match and match.group("ranks")
        self._rank = self._rank or rank
        return not rank or rank == self._rank

    def _see_milestone(self, message, at):
        graph = _GRAPH.match(message)
        if graph:
            what = graph.group("what").lower()
            part = "drafter" if what.startswith("draft") else "target" if what else self.part
            if graph.group("edge").lower() == "begin":
                self._enter("graph_capture", part, at)
            else:
                self._step(at)
            return
        for pattern, phase in _MILESTONES:
            if pattern.match(message):
                self._enter(phase, self.part, at)
                return

    def _see_http(self, at):
        # "fired up" comes even when the bind fails afterwards: only both together mean that it serves.
        self._enter("serving" if self._fired_up and self._listening else "warm_up", self.part, at)

    def _see_bar(self, bar, at):
        shards = "shards" in bar["name"] or "safetensors" in bar["name"]
        if shards and self.phase in ("starting", "distributed"):
            self._enter("loading_weights", "target", at)
        elif shards and self.phase != "loading_weights":
            return  # the last frame of a bar can come after "Load weight end"
        if bar != self.bar:
            moved = not self.bar or (bar["done"], bar["total"]) != (self.bar["done"], self.bar["total"])
            self.bar = bar
            if moved:
                self._step(at)

    def _enter(self, phase, part, at):
        if phase == self.phase and part == self.part:
            if phase == "graph_capture":
                self.bar = None
            self._step(at)
            return
        self.phase, self.part, self.bar = phase, part, None
        self.history.append({"phase": phase, "part": part, "at": at})
        self._step(at)

    def _step(self, at):
        self.progress += 1
        self.last_progress_at = at
