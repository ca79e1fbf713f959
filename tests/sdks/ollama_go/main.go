// Ollama's own client for Go; how scripts are played stands in `playing.py`.
//
// It can send no key but as a password in the address of the server.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/ollama/ollama/api"
)

const (
	question = "Where is it sunny?"
	said     = "Hello you, how are you?"
)

var (
	ctx    = context.Background()
	client = connect(os.Getenv("SDK_KEY"))
	whole  = new(bool)
)

func connect(key string) *api.Client {
	base, err := url.Parse(os.Getenv("SDK_URL"))
	check(err)
	base.User = url.UserPassword("ollama", key)
	return api.NewClient(base, http.DefaultClient)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func expect(holds bool, shown ...any) {
	if !holds {
		panic(fmt.Sprint(shown...))
	}
}

func user(text string) []api.Message {
	return []api.Message{{Role: "user", Content: text}}
}

func ask(request *api.ChatRequest) (string, api.ChatResponse, error) {
	var text strings.Builder
	var last api.ChatResponse
	calls := []api.ToolCall{}
	err := client.Chat(ctx, request, func(piece api.ChatResponse) error {
		text.WriteString(piece.Message.Content)
		calls = append(calls, piece.Message.ToolCalls...)
		last = piece
		return nil
	})
	last.Message.ToolCalls = calls
	return text.String(), last, err
}

func status(err error) int {
	var refused api.StatusError
	var unauthorized api.AuthorizationError
	if errors.As(err, &unauthorized) {
		return unauthorized.StatusCode
	}
	expect(errors.As(err, &refused) && refused.ErrorMessage != "", err)
	return refused.StatusCode
}

func chat() {
	check(client.Heartbeat(ctx))
	for _, stream := range []*bool{nil, whole} {
		options := map[string]any{"num_predict": 64.0, "top_k": -1, "seed": 1.0, "num_ctx": 512}
		text, last, err := ask(&api.ChatRequest{Model: "m", Messages: user(question), Stream: stream, Options: options})
		check(err)
		expect(text == said && last.Done && last.EvalCount == 5, text, last)
	}
}

func generates() {
	text := ""
	err := client.Generate(ctx, &api.GenerateRequest{Model: "m", Prompt: question}, func(piece api.GenerateResponse) error {
		text += piece.Response
		return nil
	})
	check(err)
	expect(text == said, text)
}

func tools() {
	var weather api.Tool
	definition := `{"type": "function", "function": {"name": "weather",
		"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}`
	check(json.Unmarshal([]byte(definition), &weather))
	request := &api.ChatRequest{Model: "m", Messages: user(question), Tools: api.Tools{weather}}
	_, last, err := ask(request)
	check(err)
	calls := last.Message.ToolCalls
	expect(len(calls) == 1 && calls[0].Function.Name == "weather", calls)
	arguments, err := json.Marshal(calls[0].Function.Arguments)
	check(err)
	expect(string(arguments) == `{"city":"Rome"}`, string(arguments))
	result := api.Message{Role: "tool", Content: "sun", ToolName: "weather", ToolCallID: calls[0].ID}
	answer := api.Message{Role: "assistant", ToolCalls: calls}
	request.Messages = append(request.Messages, answer, result)
	text, _, err := ask(request)
	check(err)
	expect(text == said, text)
}

func structured() {
	format := json.RawMessage(`{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}`)
	text, _, err := ask(&api.ChatRequest{Model: "m", Messages: user(question), Format: format})
	check(err)
	expect(json.Valid([]byte(text)), text)
}

func embeddings() {
	answer, err := client.Embed(ctx, &api.EmbedRequest{Model: "m", Input: []string{"one", "two"}})
	check(err)
	expect(len(answer.Embeddings) == 2 && len(answer.Embeddings[0]) == 2, answer)
}

func models() {
	list, err := client.List(ctx)
	check(err)
	expect(len(list.Models) == 2 && list.Models[1].Name == "m", list)
	running, err := client.ListRunning(ctx)
	check(err)
	expect(len(running.Models) == 1, running)
	shown, err := client.Show(ctx, &api.ShowRequest{Model: "m"})
	check(err)
	expect(len(shown.Capabilities) > 0, shown)
	version, err := client.Version(ctx)
	check(err)
	expect(version != "")
	check(client.Pull(ctx, &api.PullRequest{Model: "m"}, func(api.ProgressResponse) error { return nil }))
	nothing := func(api.GenerateResponse) error { return nil }
	check(client.Generate(ctx, &api.GenerateRequest{Model: "m"}, nothing))
	check(client.Generate(ctx, &api.GenerateRequest{Model: "cold", KeepAlive: &api.Duration{Duration: 0 * time.Minute}}, nothing))
}

func failures() {
	for _, request := range []struct {
		model, text string
		status      int
	}{{"none", question, 404}, {"cold", question, 503}, {"m", "Fail.", 503}} {
		for _, stream := range []*bool{nil, whole} {
			_, _, err := ask(&api.ChatRequest{Model: request.model, Messages: user(request.text), Stream: stream})
			expect(status(err) == request.status, request, err)
		}
	}
	_, _, err := ask(&api.ChatRequest{Model: "m", Messages: user("Break off.")})
	expect(err != nil && strings.Contains(err.Error(), "out of ideas"), err)
	err = client.Delete(ctx, &api.DeleteRequest{Model: "m"})
	expect(status(err) == 409 && strings.Contains(err.Error(), "models folder"), err)
	digest := "sha256:" + strings.Repeat("0", 64)
	err = client.CreateBlob(ctx, digest, strings.NewReader("x"))
	expect(status(err) == 403 && strings.Contains(err.Error(), "administrators"), err)
	err = client.Copy(ctx, &api.CopyRequest{Source: "m", Destination: "m"})
	expect(status(err) == 409, err)
	check(client.Copy(ctx, &api.CopyRequest{Source: "m", Destination: "copy of m"}))
	_, err = connect("wrong").List(ctx)
	expect(status(err) == 401, err)
}

func main() {
	for _, part := range []struct {
		name string
		play func()
	}{
		{"chat", chat}, {"generates", generates}, {"tools", tools}, {"structured", structured},
		{"embeddings", embeddings}, {"models", models}, {"failures", failures},
	} {
		part.play()
		fmt.Println(part.name + ": passed")
	}
}
