// A gRPC engine that is not the bottleneck: it answers at once, or at a given pace.
//
// The last message of a request, or else its prompt, is a script: "PAUSE TOKENS [SIZE [STATUS MESSAGE]]" with
// milliseconds between two tokens, their number, bytes of each, and the status after them. A text to embed that is
// a number delays its vector by so many milliseconds. Messages of backend.proto are encoded by hand, because only a
// few fields matter. TokenizeString returns the number of running streams and of tokens sent.
// tests/benchmarks/talker.py is the same engine in Python.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"path"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

const vectorSize, limit = 768, 64 << 20

var (
	address = flag.String("address", "127.0.0.1:50051", "host:port to listen on")
	streams = flag.Uint("streams", 0, "limit of concurrent streams, 0 = none")
	token   = flag.String("token", "", "bearer token that calls need")
	running atomic.Int64
	sent    atomic.Int64
	vector  = newVector()
)

// codec passes encoded messages through.
type codec struct{}

func (codec) Marshal(message any) ([]byte, error) { return message.([]byte), nil }
func (codec) Unmarshal(data []byte, message any) error {
	*message.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (codec) Name() string { return "proto" }

func text(number protowire.Number, value string) []byte {
	return protowire.AppendString(protowire.AppendTag(nil, number, protowire.BytesType), value)
}

func integer(number protowire.Number, value int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.VarintType), uint64(value))
}

func newVector() []byte {
	packed := make([]byte, 4*vectorSize)
	field := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), packed)
	return append(append(field, integer(2, 2)...), integer(4, 2)...)
}

// reply is one Reply: message, tokens so far, tokens of the prompt.
func reply(word string, tokens, prompt int) []byte {
	return append(append(text(1, word), integer(2, tokens)...), integer(3, prompt)...)
}

type script struct {
	pause        time.Duration
	tokens, size int
	status       codes.Code
	message      string
	promptLength int
}

// field returns the last value of a field of bytes.
func field(message []byte, wanted protowire.Number) (found []byte) {
	for len(message) > 0 {
		number, kind, size := protowire.ConsumeField(message)
		if size < 0 {
			return found
		}
		if number == wanted && kind == protowire.BytesType {
			_, _, tag := protowire.ConsumeTag(message)
			found, _ = protowire.ConsumeBytes(message[tag:])
		}
		message = message[size:]
	}
	return found
}

func parse(request []byte) script {
	prompt := field(request, 1)
	words := string(prompt)
	if last := field(request, 44); last != nil {
		words = string(field(last, 2))
	}
	parts := append(strings.SplitN(words, " ", 5), "", "", "", "", "")
	number := func(index, otherwise int) int {
		if value, err := strconv.Atoi(parts[index]); err == nil {
			return value
		}
		return otherwise
	}
	return script{
		pause:  time.Duration(number(0, 0)) * time.Millisecond,
		tokens: number(1, 1), size: number(2, 5),
		status: codes.Code(number(3, 0)), message: parts[4], promptLength: len(prompt),
	}
}

func play(request []byte, stream grpc.ServerStream, whole bool) error {
	running.Add(1)
	defer running.Add(-1)
	plan := parse(request)
	word := strings.Repeat("w", plan.size)
	if plan.size == 5 {
		word = " word"
	}
	for number, due := 1, time.Now(); number <= plan.tokens; number++ {
		if plan.pause > 0 {
			due = due.Add(plan.pause)
			select {
			case <-stream.Context().Done():
				return stream.Context().Err()
			case <-time.After(time.Until(due)):
			}
		}
		if whole {
			continue
		}
		if err := stream.SendMsg(reply(word, number, plan.promptLength)); err != nil {
			return err
		}
		sent.Add(1)
	}
	stream.SetTrailer(metadata.Pairs("localai-cached-tokens", strconv.Itoa(plan.tokens)))
	if plan.status != codes.OK {
		return status.Error(plan.status, plan.message)
	}
	if whole {
		return stream.SendMsg(reply(strings.Repeat(word, plan.tokens), plan.tokens, plan.promptLength))
	}
	return nil
}

func allowed(ctx context.Context) bool {
	given := metadata.ValueFromIncomingContext(ctx, "authorization")
	return *token == "" || len(given) == 1 && given[0] == "Bearer "+*token
}

func handle(_ any, stream grpc.ServerStream) error {
	if !allowed(stream.Context()) {
		return status.Error(codes.Unauthenticated, "token required")
	}
	var request []byte
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	method, _ := grpc.MethodFromServerStream(stream)
	switch path.Base(method) {
	case "Health":
		return stream.SendMsg(text(1, "OK"))
	case "LoadModel", "Free":
		return stream.SendMsg(integer(2, 1))
	case "Status":
		return stream.SendMsg([]byte{})
	case "Embedding":
		if pause, err := strconv.Atoi(string(field(request, 36))); err == nil {
			time.Sleep(time.Duration(pause) * time.Millisecond)
		}
		return stream.SendMsg(vector)
	case "TokenizeString":
		counts := protowire.AppendVarint(nil, uint64(running.Load()))
		counts = protowire.AppendVarint(counts, uint64(sent.Load()))
		packed := protowire.AppendTag(nil, 2, protowire.BytesType)
		return stream.SendMsg(append(integer(1, 2), protowire.AppendBytes(packed, counts)...))
	case "Predict", "PredictStream":
		return play(request, stream, path.Base(method) == "Predict")
	}
	return status.Error(codes.Unimplemented, method)
}

func main() {
	flag.Parse()
	options := []grpc.ServerOption{
		grpc.ForceServerCodec(codec{}), grpc.UnknownServiceHandler(handle),
		grpc.MaxRecvMsgSize(limit), grpc.MaxSendMsgSize(2 * limit),
	}
	if *streams > 0 {
		options = append(options, grpc.MaxConcurrentStreams(uint32(*streams)))
	}
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer(options...)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		server.GracefulStop()
	}()
	fmt.Println("listening on", listener.Addr())
	if err := server.Serve(listener); err != nil {
		log.Fatal(err)
	}
}
