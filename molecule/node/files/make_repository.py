"""Make an apt repository of packages with the driver's names.

usage: make_repository.py FOLDER FACTS-ROOT VERSION... <replay

They hold stand-ins for what the role looks at: nvidia-smi, which replays captured fields and looks at the two
services; the library; a unit that "loads the module" at boot; and the services. The last version wants
another kernel.
"""

import hashlib
import json
import pathlib
import platform
import subprocess
import sys
import tempfile

folder, facts_root, versions = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
replay = json.load(sys.stdin)
folder.mkdir(parents=True)

SMI = """#!/bin/sh
cd /usr/share/nvidia-stand-in || exit 9
[ -s {root}/sys/module/nvidia/version ] || exit 9
[ "$(cat {root}/sys/module/nvidia/version)" = {version} ] || exit 18
fabric="In Progress" persistence=Disabled
systemctl is-active --quiet nvidia-fabricmanager && fabric=Completed
systemctl is-active --quiet nvidia-persistenced && persistence=Enabled
case "$1" in
-q)
  exec sed -e "s|<state>Completed|<state>$fabric|" \\
    -e "s|<persistence_mode>Enabled|<persistence_mode>$persistence|" q.xml
  ;;
--query-gpu*) exec cat query.csv ;;
topo) exec cat topo.txt ;;
esac
exit 2
"""
SERVICE = """[Unit]
Description=Stand-in
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={command}
[Install]
WantedBy=multi-user.target
"""


def make(name, version, depends="", files=None, postinst="", source=""):
    with tempfile.TemporaryDirectory() as work:
        root = pathlib.Path(work)
        root.chmod(0o755)
        control = (
            f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: tests\nDescription: empty\n"
        )
        if source:
            control += f"Source: {source}\n"
        if depends:
            control += f"Depends: {depends}\n"
        (root / "DEBIAN").mkdir()
        (root / "DEBIAN/control").write_text(control)
        if postinst:
            (root / "DEBIAN/postinst").write_text("#!/bin/sh\nset -e\n" + postinst)
            (root / "DEBIAN/postinst").chmod(0o755)
        for path, text in (files or {}).items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755 if "/bin/" in path else 0o644)
        target = folder / f"{name}_{version}_all.deb"
        subprocess.run(["dpkg-deb", "--build", "--root-owner-group", str(root), str(target)], check=True)
    raw = target.read_bytes()
    return (
        control + f"Filename: ./{target.name}\nSize: {len(raw)}\nSHA256: {hashlib.sha256(raw).hexdigest()}\n"
    )


index = []
for version in versions:
    full = f"{version}-1"
    # As with NVIDIA's packages: of exactly this version, though a newer one is there, and by other names too.
    depends = f"libnvidia-compute (= {full}), libnvcuvid1 (= {full})"
    if version == versions[-1] and len(versions) > 1:
        depends += ", linux-image-9.9.9-amd64"
    load = f"mkdir -p {facts_root}/sys/module/ib_umad; echo {version} >{facts_root}/sys/module/nvidia/version"
    load = SERVICE.format(command=f"/bin/sh -c '{load}'")
    files = {
        "usr/bin/nvidia-smi": SMI.format(root=facts_root, version=version),
        "lib/systemd/system/stand-in-module.service": load,
        **{f"usr/share/nvidia-stand-in/{name}": text for name, text in replay.items()},
    }
    # At the next boot, like the module of a new driver.
    enable = (
        "ln -sf /lib/systemd/system/stand-in-module.service /etc/systemd/system/multi-user.target.wants/\n"
    )
    library = {f"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{version}": ""}
    daemon = {"lib/systemd/system/nvidia-persistenced.service": SERVICE.format(command="/bin/true")}
    manager = {"lib/systemd/system/nvidia-fabricmanager.service": SERVICE.format(command="/bin/true")}
    index.append(make("nvidia-open", full, depends, files, enable))
    index.append(make("libnvidia-compute", full, files=library))
    index.append(make("nvidia-fabricmanager", full, files=manager))
    index.append(make("nvidia-persistenced", full, files=daemon))
    index.append(make("libnvcuvid1", full, source="nvidia-graphics-drivers"))
    index.append(make("libnvsdm", full))
for name, version in (
    ("nvlsm", "2025.06.11-1"),
    ("infiniband-diags", "999-1"),
    ("linux-image-9.9.9-amd64", "9.9.9-1"),
):
    index.append(make(name, version))
index.append(make("linux-headers-" + platform.release(), "1-1"))
(folder / "Packages").write_text("\n".join(index))
