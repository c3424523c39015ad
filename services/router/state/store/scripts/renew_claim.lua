-- ARGV: worker id, session, lease ms. The tag is the prefix. Returns held, replaced or gone.
local key = claim_key(ARGV[1])
local session = redis.call('HGET', key, 'session')
if not session then return 'gone' end
if session ~= ARGV[2] then return 'replaced' end
redis.call('PEXPIRE', key, ARGV[3])
return 'held'
