-- ARGV: ids of ended requests. Returns those without reservations.
local unknown, now = {}, now_ms()
for _, request in ipairs(ARGV) do
  local packed = redis.call('HGET', RESERVATIONS, request)
  if packed then unbook(request, packed) else unknown[#unknown + 1] = request end
  redis.call('ZADD', ENDED, now, request)
end
redis.call('ZREMRANGEBYSCORE', ENDED, '-inf', now - ENDED_FOR_MS)
redis.call('ZREMRANGEBYRANK', ENDED, 0, -MAX_ENDED - 1)
return unknown
