// A host that runs nothing: it says what the kit decides about the tool that the task names.
package main

import (
	"context"

	"backplane/host"
)

func main() {
	host.Serve(host.Host{ID: "judge"}, func(_ context.Context, run *host.Run) (host.Done, error) {
		run.Event("assistant_message", host.Members{"text": run.May(run.Order.Task, host.Members{}, nil).Decision})
		return host.Done{}, nil
	})
}
