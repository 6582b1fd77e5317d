// A host with the kit: the task is a shell command, asked for before it runs, its output told as it comes.
package main

import (
	"context"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"backplane/host"
)

const previewBytesMax = 8192

type teller struct {
	run     *host.Run
	preview string
}

func (t *teller) Write(data []byte) (int, error) {
	text := strings.ToValidUTF8(string(data), "\uFFFD") // Only a character on the cut of two reads is lost.
	t.preview = strings.ToValidUTF8((t.preview + text)[:min(len(t.preview+text), previewBytesMax)], "")
	told := host.Members{"output": host.Members{"stream": "stdout", "text": text}}
	t.run.Event("warning", host.Members{"message": strings.TrimSpace(text), "ext": told})
	return len(data), nil
}

func work(ctx context.Context, run *host.Run) (host.Done, error) {
	command, root, told := run.Order.Task, run.Order.Workspace.Root, &teller{run: run}
	input, more := host.Members{"command": command}, host.Members{"command": command, "cwd": root, "tool_use_id": "bash-1"}
	run.Event("tool_call", host.Members{"tool_name": "bash", "tool_use_id": "bash-1", "input": input})
	result := host.Members{"tool_name": "bash", "tool_use_id": "bash-1", "is_error": true}
	if verdict := run.May("bash", input, more); verdict.Decision != "allow" {
		result["output"] = "policy_denied: " + verdict.Reason
		run.Event("tool_result", result)
		return host.Done{Outcome: "failed"}, nil
	}
	child := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	child.Dir, child.Env, child.Stdout, child.Stderr = root, run.Environ(), told, told
	// A group of its own, so that whatever the command starts ends with it.
	child.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	child.Cancel = func() error { return syscall.Kill(-child.Process.Pid, syscall.SIGTERM) }
	child.WaitDelay = 500 * time.Millisecond
	if err := child.Start(); err != nil {
		return host.Done{}, host.Error{Code: "execution_tool_failed", Text: err.Error()}
	}
	child.Wait()
	syscall.Kill(-child.Process.Pid, syscall.SIGKILL)
	code := child.ProcessState.ExitCode()
	run.Event("command_executed", host.Members{"command": command, "exit_code": code, "output_preview": told.preview})
	result["output"], result["is_error"] = told.preview, code != 0
	run.Event("tool_result", result)
	return host.Done{Outcome: map[bool]string{true: "failed", false: "complete"}[code != 0]}, nil
}

func main() {
	host.Serve(host.Host{ID: "shell:go", Capabilities: host.Levels{"streaming": "native", "tool_bash": "native"}, Heeds: []string{"max_turns", "max_budget_usd"}}, work)
}
