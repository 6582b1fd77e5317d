// Plays the cases of a file through the Go client and says in one line of JSON how each went.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"driver/backplane"
)

type oneCase struct {
	Cell   string            `json:"cell"`
	Order  json.RawMessage   `json:"order"`
	Answer *backplane.Answer `json:"answer"`
	When   string            `json:"when"`
	Change bool              `json:"change"`
	Times  int               `json:"times"`
}

type sealed struct {
	Outcome  string `json:"outcome"`
	UsageRaw struct {
		Backplane struct {
			End struct {
				Reason string `json:"reason"`
			} `json:"end"`
		} `json:"backplane"`
	} `json:"usage_raw"`
}

type event struct {
	Type    string `json:"type"`
	Text    string `json:"text"`
	IsError bool   `json:"is_error"`
}

var output = json.NewEncoder(os.Stdout)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func orNull(text string) any {
	if text == "" {
		return nil
	}
	return text
}

func oneDigitChanged(receipt []byte) []byte {
	changed := bytes.Clone(receipt)
	mark := []byte(`"duration_ms":`)
	at := bytes.Index(changed, mark) + len(mark)
	changed[at] = '0' + (changed[at]-'0'+1)%10
	return changed
}

func play(client *backplane.Client, one oneCase) {
	asks, types, toolErrors := []string{}, []string{}, 0
	var onAsk func(backplane.Ask) backplane.Answer
	if one.Answer != nil {
		onAsk = func(ask backplane.Ask) backplane.Answer {
			asks = append(asks, ask.Name)
			return *one.Answer
		}
	}
	run, err := client.Submit(one.Order, onAsk)
	must(err)
	text, textBytes := sha256.New(), 0
	for raw, more := run.Next(); more; raw, more = run.Next() {
		var seen event
		must(json.Unmarshal(raw, &seen))
		if seen.Type != "warning" {
			types = append(types, seen.Type)
		}
		if seen.IsError {
			toolErrors++
		}
		if seen.Type != "assistant_message" {
			continue
		}
		text.Write([]byte(seen.Text))
		textBytes += len(seen.Text)
		switch one.When {
		case "cancel":
			run.Cancel("the user changed his mind", 2*time.Second)
		case "kill the server":
			must(syscall.Kill(client.PID(), syscall.SIGKILL))
		case "wait":
			must(output.Encode(map[string]any{"cell": one.Cell, "ready": true}))
		}
	}
	end := run.End()
	var receipt sealed
	if end.Receipt != nil {
		must(json.Unmarshal(end.Receipt, &receipt))
	}
	record := map[string]any{
		"cell": one.Cell, "types": types, "text_bytes": textBytes, "text_sha256": hex.EncodeToString(text.Sum(nil)),
		"tool_errors": toolErrors, "asks": asks, "end": map[bool]string{true: "final", false: "fatal"}[end.Final],
		"code": orNull(end.ErrorCode), "outcome": orNull(receipt.Outcome),
		"reason": orNull(receipt.UsageRaw.Backplane.End.Reason), "as_streamed": end.Events != nil,
		"verified": end.Verified, "changed_verifies": nil,
	}
	if one.Change {
		record["changed_verifies"] = backplane.Verify(oneDigitChanged(end.Receipt), end.Events)
	}
	must(output.Encode(record))
}

func playMany(client *backplane.Client, one oneCase) {
	var order map[string]any
	must(json.Unmarshal(one.Order, &order))
	var all sync.WaitGroup
	var mutex sync.Mutex
	counts := map[string]int{"finals": 0, "verified": 0, "own": 0}
	for number := range one.Times {
		mine := map[string]any{}
		for name, value := range order {
			mine[name] = value
		}
		mine["task"] = fmt.Sprintf("%s %d", order["task"], number)
		all.Add(1)
		go func() {
			defer all.Done()
			run, err := client.Submit(mine, nil)
			must(err)
			text := ""
			for raw, more := run.Next(); more; raw, more = run.Next() {
				var seen event
				must(json.Unmarshal(raw, &seen))
				if seen.Type == "assistant_message" {
					text += seen.Text
				}
			}
			end := run.End()
			mutex.Lock()
			defer mutex.Unlock()
			for name, is := range map[string]bool{"finals": end.Final, "verified": end.Verified, "own": text == mine["task"]} {
				if is {
					counts[name]++
				}
			}
		}()
	}
	all.Wait()
	must(output.Encode(map[string]any{"cell": one.Cell, "runs": one.Times, "finals": counts["finals"],
		"verified": counts["verified"], "own": counts["own"]}))
}

func main() {
	var plan struct {
		Command []string  `json:"command"`
		Cases   []oneCase `json:"cases"`
	}
	file, err := os.ReadFile(os.Args[1])
	must(err)
	must(json.Unmarshal(file, &plan))
	client, err := backplane.Open(context.Background(), backplane.Options{Command: plan.Command})
	must(err)
	must(client.Ping(context.Background()))
	for _, one := range plan.Cases {
		if one.Times > 0 {
			playMany(client, one)
		} else {
			play(client, one)
		}
	}
	must(client.Close())
}
