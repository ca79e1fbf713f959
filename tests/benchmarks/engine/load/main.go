// A load generator: clients that repeat one request on connections of their own, and read each response to its end.
// With -direct they call PredictStream of an engine instead, all over one connection, as the product does.
//
// It prints one line of JSON: requests, errors, seconds, its own processor time, and milliseconds until the first
// byte of a body, between two pieces of one, and of whole requests.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
)

var (
	direct  = flag.String("direct", "", "host:port of an engine; the body is then its script")
	url     = flag.String("url", "", "where to POST")
	key     = flag.String("key", "", "API key")
	body    = flag.String("body", "", "JSON of the request")
	end     = flag.String("end", "", "text without which a response is an error")
	clients = flag.Int("clients", 1, "requests at a time")
	seconds = flag.Float64("seconds", 5, "duration")
	spread  = flag.Float64("spread", 0, "seconds over which the clients begin")
)

// times are those of one client, in milliseconds.
type times struct {
	first, gap, whole []float64
	errors            int
}

func since(begin time.Time) float64 { return float64(time.Since(begin).Microseconds()) / 1000 }

// piece records that a part of a body has arrived.
func (seen *times) piece(begin time.Time, previous *time.Time) {
	if previous.IsZero() {
		seen.first = append(seen.first, since(begin))
	} else {
		seen.gap = append(seen.gap, since(*previous))
	}
	*previous = time.Now()
}

// codec passes encoded messages through.
type codec struct{}

func (codec) Marshal(message any) ([]byte, error) { return message.([]byte), nil }
func (codec) Unmarshal([]byte, any) error         { return nil }
func (codec) Name() string                        { return "proto" }

func (seen *times) call(connection *grpc.ClientConn) {
	content := protowire.AppendString(protowire.AppendTag(nil, 2, protowire.BytesType), *body)
	message := protowire.AppendBytes(protowire.AppendTag(nil, 44, protowire.BytesType), content)
	begin, previous := time.Now(), time.Time{}
	description, method := &grpc.StreamDesc{ServerStreams: true}, "/backend.Backend/PredictStream"
	stream, err := connection.NewStream(context.Background(), description, method, grpc.ForceCodec(codec{}))
	if err == nil {
		err = stream.SendMsg(message)
	}
	if err == nil {
		err = stream.CloseSend()
	}
	for err == nil {
		if err = stream.RecvMsg(nil); err == nil {
			seen.piece(begin, &previous)
		}
	}
	if err != io.EOF || previous.IsZero() {
		seen.errors++
	}
	seen.whole = append(seen.whole, since(begin))
}

func (seen *times) send(client *http.Client, piece []byte) {
	request, err := http.NewRequest("POST", *url, strings.NewReader(*body))
	if err != nil {
		panic(err)
	}
	request.Header.Set("Authorization", "Bearer "+*key)
	request.Header.Set("Content-Type", "application/json")
	begin := time.Now()
	response, err := client.Do(request)
	if err != nil {
		seen.errors++
		return
	}
	defer response.Body.Close()
	complete, previous := *end == "", time.Time{}
	for err == nil {
		var size int
		size, err = response.Body.Read(piece)
		if size == 0 {
			continue
		}
		seen.piece(begin, &previous)
		complete = complete || bytes.Contains(piece[:size], []byte(*end))
	}
	if err != io.EOF || response.StatusCode != 200 || !complete {
		seen.errors++
	}
	seen.whole = append(seen.whole, since(begin))
}

func percentile(values []float64, share float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[int(float64(len(values)-1)*share)]
}

func main() {
	flag.Parse()
	transport := &http.Transport{MaxIdleConnsPerHost: *clients, DisableCompression: true}
	client := &http.Client{Transport: transport}
	connection, err := grpc.NewClient(*direct, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	all := make([]times, *clients)
	var group sync.WaitGroup
	begin := time.Now()
	until := begin.Add(time.Duration(*seconds * float64(time.Second)))
	for number := range all {
		group.Go(func() {
			time.Sleep(time.Duration(*spread * float64(number) / float64(*clients) * float64(time.Second)))
			piece := make([]byte, 1<<16)
			for time.Now().Before(until) {
				if *direct != "" {
					all[number].call(connection)
				} else {
					all[number].send(client, piece)
				}
			}
		})
	}
	group.Wait()
	took := time.Since(begin).Seconds()
	var sum times
	for _, seen := range all {
		sum.first, sum.gap = append(sum.first, seen.first...), append(sum.gap, seen.gap...)
		sum.whole, sum.errors = append(sum.whole, seen.whole...), sum.errors+seen.errors
	}
	var usage syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	figures := map[string]any{
		"requests": len(sum.whole), "errors": sum.errors, "seconds": took,
		"processor": time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds(),
		"first_p50": percentile(sum.first, 0.5), "first_p99": percentile(sum.first, 0.99),
		"gap_p99": percentile(sum.gap, 0.99), "p50": percentile(sum.whole, 0.5), "p99": percentile(sum.whole, 0.99),
	}
	_ = json.NewEncoder(os.Stdout).Encode(figures)
}
