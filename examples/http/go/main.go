// A scheduler in front of a gateway that does not select workers (`--routing direct`): it has the router select and
// reserve a worker for each request, and forwards the request with the headers that name it.
//
//	go run . 127.0.0.1:8060 http://127.0.0.1:8050 http://127.0.0.1:8000
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"os"
	"time"
)

const maxBodyBytes = 4 << 20

type scheduler struct {
	router  *Router
	gateway string
	client  *http.Client
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: scheduler LISTEN ROUTER GATEWAY")
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, ResponseHeaderTimeout: 10 * time.Minute}}
	router := &Router{BaseURL: os.Args[2], Token: os.Getenv("SLUICE_ROUTER_TOKEN"), Client: client}
	server := &http.Server{
		Addr:              os.Args[1],
		Handler:           &scheduler{router, os.Args[3], client},
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       30 * time.Second,
	}
	log.Fatal(server.ListenAndServe())
}

func (s *scheduler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBodyBytes))
	if err != nil {
		fail(w, &RouterError{Status: http.StatusBadRequest, Code: "bad_body", Message: "The body cannot be read."})
		return
	}
	route, err := s.router.Route(r.Context(), newID(), body)
	if err != nil {
		fail(w, err)
		return
	}
	// The client may be gone by then; the reservation is freed all the same.
	defer s.release(s.router.Free, route.Reservation)
	response, err := s.forward(r, body, route)
	if err != nil {
		fail(w, err)
		return
	}
	defer response.Body.Close()
	s.release(s.router.PrefillComplete, route.Reservation)
	for name, values := range response.Header {
		w.Header()[name] = values
	}
	w.Header().Set("X-Routed-To", route.Worker)
	w.WriteHeader(response.StatusCode)
	stream(w, response.Body)
}

// forward sends the request to the gateway, with the headers that name the chosen worker.
func (s *scheduler) forward(r *http.Request, body []byte, route *Route) (*http.Response, error) {
	request, err := http.NewRequestWithContext(r.Context(), r.Method, s.gateway+r.URL.Path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	if key := r.Header.Get("Authorization"); key != "" {
		request.Header.Set("Authorization", key)
	}
	for name, value := range route.Headers {
		request.Header.Set(name, value)
	}
	return s.client.Do(request)
}

func (s *scheduler) release(call func(context.Context, string) error, reservation string) {
	if err := call(context.Background(), reservation); err != nil {
		log.Printf("reservation %s is left to expire: %v", reservation, err)
	}
}

// stream copies the response and flushes every piece at once, so that tokens are not held back.
func stream(w http.ResponseWriter, from io.Reader) {
	flusher, buffer := http.NewResponseController(w), make([]byte, 32<<10)
	for {
		count, err := from.Read(buffer)
		if _, failed := w.Write(buffer[:count]); failed != nil || err != nil {
			return
		}
		_ = flusher.Flush()
	}
}

func fail(w http.ResponseWriter, err error) {
	failed := &RouterError{Status: http.StatusBadGateway, Code: "unreachable", Message: err.Error()}
	_ = errors.As(err, &failed)
	if failed.RetryAfter != "" {
		w.Header().Set("Retry-After", failed.RetryAfter)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(failed.Status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": failed})
}

func newID() string {
	id := make([]byte, 16)
	_, _ = rand.Read(id)
	return hex.EncodeToString(id)
}
