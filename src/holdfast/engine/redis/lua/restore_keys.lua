-- restore_keys: write idempotency keys that do not exist.
-- KEYS   n idempotency keys
-- ARGV   2 per key: job id, expiry in ms
-- Reply  number of keys written
local at, count = now_ms(), 0
for i = 1, #KEYS do
  local left = tonumber(ARGV[2 * i]) - at
  if left > 0 and redis.call('SET', KEYS[i], ARGV[2 * i - 1], 'NX', 'PX', format_integer(left)) then count = count + 1 end
end
return count
