-- restore_keys: write idempotency keys that do not exist.
-- KEYS   n idempotency keys
-- ARGV   3 per key: job id, fingerprint, expiry in ms
-- Reply  number of keys written
local at, count = now_ms(), 0
for i = 1, #KEYS do
  local left, value = tonumber(ARGV[3 * i]) - at, key_value(ARGV[3 * i - 2], ARGV[3 * i - 1])
  if left > 0 and redis.call('SET', KEYS[i], value, 'NX', 'PX', format_integer(left)) then count = count + 1 end
end
return count
