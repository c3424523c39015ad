-- ARGV: maximum reservations to remove. Removes those of owners whose lease expired; returns their number.
local left = tonumber(ARGV[1])
for _, owner in ipairs(redis.call('ZRANGEBYSCORE', OWNERS, '-inf', now_ms(), 'LIMIT', 0, left)) do
  for _, request in ipairs(redis.call('SPOP', owned_key(owner), left)) do
    local packed = redis.call('HGET', RESERVATIONS, request)
    if packed then unbook(request, packed) end
    left = left - 1
  end
  if left == 0 then break end
  redis.call('ZREM', OWNERS, owner)
end
return ARGV[1] - left
