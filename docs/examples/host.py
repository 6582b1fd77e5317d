"""A host, which any control plane can give work to: backplane run --sidecar 'python host.py' "a task"."""

import anyio

from backplane.contract.capability import NATIVE
from backplane.host import Done, Host, HostRun, main


async def work(run: HostRun) -> Done:
    await run.message(f"I was asked: {run.order.task}")
    root = run.order.workspace.root or "."
    await anyio.Path(root, "ANSWER.md").write_text(f"# {run.order.task}\n", encoding="utf-8")
    return Done()


if __name__ == "__main__":
    main(Host(id="example", capabilities={"streaming": NATIVE, "tool_write": NATIVE}), work)
