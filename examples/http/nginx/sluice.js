// njs: has the router select and reserve a worker for each request, and forwards it with the headers that name it.
// The reservation is freed by `post_action` in nginx.conf, also when the client disconnects.

async function route(r) {
    const answer = await r.subrequest('/_sluice/route', { method: 'POST', body: r.requestText });
    if (answer.status !== 200) {
        if (answer.headersOut['Retry-After']) {
            r.headersOut['Retry-After'] = answer.headersOut['Retry-After'];
        }
        r.headersOut['Content-Type'] = 'application/json';
        r.return(answer.status, answer.responseText);
        return;
    }
    const chosen = JSON.parse(answer.responseText);
    r.variables.sluice_reservation = chosen.reservation;
    r.variables.sluice_worker = chosen.worker;
    r.variables.sluice_rank = chosen.rank;
    r.variables.sluice_prefill = chosen.prefill ? chosen.prefill.worker : '';
    r.internalRedirect('@worker');
}

async function free(r) {
    const reservation = r.variables.sluice_reservation;
    if (reservation) {
        await r.subrequest('/_sluice/free', { method: 'POST', body: JSON.stringify({ reservation }) });
    }
    r.return(204);
}

export default { route, free };
