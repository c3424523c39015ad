// A client of the router's HTTP API; it needs only the standard library.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

const maxAnswerBytes = 8 << 20

// Router calls the HTTP API of a router.
type Router struct {
	BaseURL string // such as http://127.0.0.1:8050
	Token   string // empty: none is sent
	Client  *http.Client
}

// Target is a rank of a worker.
type Target struct {
	Worker  string `json:"worker"`
	Address string `json:"address"`
	Rank    int    `json:"rank"`
}

// Route is the answer to a request: where to run it, and the reservation to free afterwards.
type Route struct {
	Target
	Prefill       *Target           `json:"prefill"` // nil: the worker computes the prompt, too
	Reservation   string            `json:"reservation"`
	ExpiresUnixMS int64             `json:"expires_unix_ms"`
	Headers       map[string]string `json:"headers"`
	OverlapBlocks int               `json:"overlap_blocks"`
	Degraded      string            `json:"degraded"`
}

// RouterError is an error of the router.
type RouterError struct {
	Status     int    `json:"-"`
	RetryAfter string `json:"-"`
	Code       string `json:"code"`
	Message    string `json:"message"`
	Param      string `json:"param"`
}

func (e *RouterError) Error() string { return fmt.Sprintf("%d %s: %s", e.Status, e.Code, e.Message) }

// Route selects and reserves a worker for the body of an OpenAI request. It may be repeated with the same request id.
func (r *Router) Route(ctx context.Context, requestID string, body []byte) (*Route, error) {
	query := url.Values{"request_id": {requestID}}
	var route Route
	return &route, r.post(ctx, "/route?"+query.Encode(), body, &route)
}

// PrefillComplete releases the prefill load of a reservation; call it at the first byte of the response.
func (r *Router) PrefillComplete(ctx context.Context, reservation string) error {
	return r.post(ctx, "/prefill_complete", named(reservation), nil)
}

// Free releases a reservation; call it at the end of every request, also after errors.
func (r *Router) Free(ctx context.Context, reservation string) error {
	return r.post(ctx, "/free", named(reservation), nil)
}

func named(reservation string) []byte {
	body, _ := json.Marshal(map[string]string{"reservation": reservation})
	return body
}

func (r *Router) post(ctx context.Context, path string, body []byte, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.BaseURL+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	if r.Token != "" {
		request.Header.Set("Authorization", "Bearer "+r.Token)
	}
	response, err := r.Client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxAnswerBytes))
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		failed := struct {
			Error *RouterError `json:"error"`
		}{}
		if json.Unmarshal(text, &failed) != nil || failed.Error == nil {
			return errors.New(response.Status)
		}
		failed.Error.Status, failed.Error.RetryAfter = response.StatusCode, response.Header.Get("Retry-After")
		return failed.Error
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}
