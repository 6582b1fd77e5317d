"""A host that runs nothing: it says what the kit decides about the tool that the task names."""

from backplane.host import Done, Host, HostRun, main


async def work(run: HostRun) -> Done:
    verdict = await run.may(run.order.task, {"path": "a", "url": "http://a.test/"})
    await run.message(verdict.decision)
    return Done()


main(Host(id="judge", capabilities={}), work)
