-- Returns {slots and prefill, slots and decode, slots and requests, {worker, report, ...}}.
local reports = {}
for _, id in ipairs(redis.call('ZRANGE', WORKERS, 0, -1)) do
  local report = redis.call('HGET', worker_key(id), 'report')
  if report then
    reports[#reports + 1] = id
    reports[#reports + 1] = report
  end
end
return {redis.call('HGETALL', PREFILL), redis.call('HGETALL', DECODE), redis.call('HGETALL', REQUESTS), reports}
