// One order from Go, its questions answered here. Usage: client TASK FOLDER
// The package is contracts/clients/backplane.go, which a program of yours keeps in a folder of its module.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"

	"example/backplane"
)

func main() {
	client, err := backplane.Open(context.Background(), backplane.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	order := map[string]any{"task": os.Args[1], "workspace": map[string]any{"root": os.Args[2]}}
	run, err := client.Submit(order, func(ask backplane.Ask) backplane.Answer {
		return backplane.Answer{Decision: "deny", Reason: ask.Name + " is for a person to decide"}
	})
	if err != nil {
		log.Fatal(err)
	}
	for raw, more := run.Next(); more; raw, more = run.Next() {
		var event struct{ Type, Text string }
		if json.Unmarshal(raw, &event) == nil && event.Type == "assistant_message" {
			fmt.Println(event.Text)
		}
	}
	end := run.End()
	var receipt struct{ Outcome string }
	_ = json.Unmarshal(end.Receipt, &receipt)
	verified := map[bool]string{true: "verified", false: "NOT VERIFIED"}[end.Verified]
	fmt.Println(receipt.Outcome, verified)
}
