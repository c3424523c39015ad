"""The documented line generates stubs that work without this project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

DOCUMENT = ROOT / "docs" / "embedding-the-router.md"


def test_documented_protoc_line_writes_importable_stubs(tmp_path: Path) -> None:
    (line,) = re.findall(r"^    python (-m grpc_tools.protoc .+?[^\\])$", DOCUMENT.read_text("utf-8"), re.M | re.S)
    arguments = line.replace("=stubs", f"={tmp_path}").replace("\\", "").split()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, timeout=60)
    use = (
        "import sluice; sluice.__path__[:] = ['sluice']; from sluice.v1 import router_pb2, router_pb2_grpc; "
        "print(router_pb2.__file__, router_pb2_grpc.RouterStub)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", use],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.startswith(("sluice/v1/router_pb2.py", f"{tmp_path}/sluice/v1/router_pb2.py"))
