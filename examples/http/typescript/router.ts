// A client of the router's HTTP API, for Node.js, Deno, Bun and service workers: it needs only `fetch`.

export interface Target {
    worker: string;
    address: string;
    rank: number;
}

export interface Route extends Target {
    prefill: Target | null; // null: the worker computes the prompt, too
    reservation: string;
    expires_unix_ms: number;
    headers: Record<string, string>; // name the worker to a gateway with `--routing direct`
    overlap_blocks: number;
    tokens_to_compute: number;
    degraded: string | null;
    router_hint: (Target & { blocks: number }) | null;
}

export class RouterError extends Error {
    constructor(
        readonly status: number,
        readonly code: string,
        message: string,
        readonly param: string | null,
        readonly retryAfterSeconds: number,
    ) {
        super(message);
    }
}

export class Router {
    constructor(
        private readonly baseUrl: string,
        private readonly token = "",
    ) {}

    /** Selects and reserves a worker for an OpenAI request body; may be repeated with the same request id. */
    route(body: string, requestId: string): Promise<Route> {
        return this.post<Route>(`/route?request_id=${encodeURIComponent(requestId)}`, body);
    }

    /** Releases the prefill load of a reservation; call it at the first byte of the response. */
    prefillComplete(reservation: string): Promise<{ unknown: number }> {
        return this.post("/prefill_complete", JSON.stringify({ reservation }));
    }

    /** Releases a reservation; call it at the end of every request, also after errors. */
    free(reservation: string): Promise<{ unknown: number }> {
        return this.post("/free", JSON.stringify({ reservation }));
    }

    private async post<T>(path: string, body: string): Promise<T> {
        const headers: Record<string, string> = { "content-type": "application/json" };
        if (this.token) headers.authorization = `Bearer ${this.token}`;
        const response = await fetch(this.baseUrl + path, {
            method: "POST",
            headers,
            body,
            signal: AbortSignal.timeout(30_000),
        });
        const answer = await response.json();
        if (!response.ok) {
            const { code, message, param } = answer.error;
            const delay = Number(response.headers.get("retry-after") ?? 0);
            throw new RouterError(response.status, code, message, param, delay);
        }
        return answer as T;
    }
}
