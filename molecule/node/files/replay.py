"""Print what nvidia-smi says on the derived B200 node, as JSON: replay.py FOLDER-OF-THE-UNIT-TESTS."""

import json
import sys

sys.path.insert(0, sys.argv[1])
import gpu_nodes

node = gpu_nodes.describe("b200x8")
xml, csv = gpu_nodes.derive_xml(node)
print(json.dumps({"q.xml": xml, "query.csv": csv, "topo.txt": gpu_nodes.derive_topology(node)}))
