"""Scripts over the runs of blocks of one tag in a Redis (layout: `redis_runs.py`).

A call of the server from Lua costs more than the work it does, so every script reads with one command per kind of key,
decides, and writes with one command per kind of key. The exception is a read of blocks as they lie in runs: two short
commands for each run cost less than a string in Lua for each block. The fewest bytes are copied where blocks that are
stored as one run change together; else a run is taken apart, which needs a look at each of its blocks.

Names of runs are made here, below `KEYS[…]` that is their common beginning. They share its hash tag, so they lie on the
server that runs the script. While a cluster moves a slot away it refuses keys that are gone: all reads come
before the first write, and the first write makes the new runs, so such a refusal leaves everything as it was.
"""

from __future__ import annotations

from typing import Final

from kvcm.store.redis.client import Script

__all__ = [
    "AROUND",
    "AUDIT",
    "CHANGE",
    "COLDEST",
    "COLDEST_RUNS",
    "DROP",
    "DROP_RUN",
    "FAMILIES",
    "KEYS",
    "LIFT_FENCE",
    "LISTING",
    "MEND",
    "NEWER",
    "OUTER_FAMILIES",
    "PLACES",
    "READ",
    "REQUEUE",
    "SAMPLE",
    "SAMPLE_RUNS",
    "SERVE",
    "SET_FENCE",
    "SHRINK",
    "STRAY",
    "TOTALS",
    "TOUCH",
]

_FENCE: Final = """
-- A fence is the highest number of a move that the tag took part in, and a state: 'copying' lets that move alone change
-- blocks, 'live' everybody else, 'leaving' nobody, and after 'left' they cannot be read either.
local function refuse(fence)
  error({err = 'KVCMMOVED ' .. fence .. ': the blocks are moving to another metadata store; try again'})
end

local function check_fence(name, number)
  local fence = redis.call('GET', name) or '0 live'
  if fence ~= (number == '' and '0 live' or number .. ' copying') then
    if number ~= '' or string.sub(fence, -5) ~= ' live' then refuse(fence) end
  end
end

local function check_present(name)
  local fence = redis.call('GET', name)
  if fence and string.sub(fence, -5) == ' left' then refuse(fence) end
end
"""
_HEADS: Final = """
-- Returns the keys of a run, as many as are whole, without reading the rest; '' where it is gone.
local function keys_at(name)
  local head = redis.call('GETRANGE', name, 9, 521)
  if head == '' then return '' end
  return string.sub(head, 2, 1 + 8 * math.min(string.byte(head), math.floor((#head - 1) / 8)))
end

-- Returns where a key begins among keys, nil where it is not one of them.
local function find(keys, key)
  local at = string.find(keys, key, 1, true)
  while at and at % 8 ~= 1 do at = string.find(keys, key, at + 1, true) end
  return at
end
"""
_NOTICES: Final = """
-- Managers that keep answers for these blocks forget them.
local function notify_stale(prefix, keys)
  local channel, uid = string.match(prefix, '^(.*){(%d+)')
  redis.call('PUBLISH', channel, uid .. '.' .. keys)
end

-- Managers that follow which blocks can be read learn of new ones. Mostly there is none, and to ask costs less than to
-- publish, which replicas and files get too. Where a user may not ask, it is published.
local function notify_served(prefix, texts)
  local channel, uid = string.match(prefix, '^(.*)k{(%d+)')
  channel = channel .. 'n'
  local listeners = redis.pcall('PUBSUB', 'NUMSUB', channel)
  if listeners.err or listeners[2] > 0 then redis.call('PUBLISH', channel, uid .. '.' .. table.concat(texts)) end
end

-- Managers read again what they know of a tag as a whole, those that wait for its next change.
local function notify_changed(name) redis.call('SET', name, '', 'NX') end
"""
_CUT: Final = """
local function cut(text, width)
  local items, n, sub = {}, 0, string.sub
  for at = 1, #text, width do
    n = n + 1
    items[n] = sub(text, at, at + width - 1)
  end
  return items
end
"""
_WALK: Final = """
-- Returns how many bytes of keys of blocks from `at` on are those that follow a key in its run.
local function following(text, at, keys, key)
  local from = string.find(keys, key, 1, true)
  -- Mostly the run lies there as a whole: that is seen without a copy of its keys.
  if from == 1 and string.find(text, keys, at - 8, true) == at - 8 then return #keys - 8 end
  while from and from % 8 ~= 1 do from = string.find(keys, key, from + 1, true) end
  if not from then return 0 end
  local size = math.min(#keys - from - 7, #text - at + 1)
  if string.sub(text, at, at + size - 1) == string.sub(keys, from + 8, from + 7 + size) then return size end
  local same = 0
  while string.sub(text, at + same, at + same + 7) == string.sub(keys, from + 8 + same, from + 15 + same) do
    same = same + 8
  end
  return same
end

-- Finds the runs of blocks, whose keys are given one after the other. Mostly they stand as in their run: then the
-- index is read for one key, and the run says which others it leads to. Where fewer than 8 keys follow, the index is
-- read for twice as many at once as before: so no order of keys takes more than one command for every few of them.
-- `open` is called once for each id, and with false where a key leads to no run; it returns the run's keys, or nil to
-- end the walk there. `visit`, if there is one, is called with an id and the positions of the first and the last of
-- some keys that lead to it. Returns how many keys were looked up.
local function walk(index, text, open, visit)
  local keys, at, most = {}, 1, 1
  while at <= #text do
    local members = cut(string.sub(text, at, at + 8 * most - 1), 8)
    local ids, before = redis.call('HMGET', index, unpack(members)), (at - 1) / 8
    for i = 1, #ids do
      local id = ids[i]
      if not keys[id] then
        keys[id] = open(id)
        if not keys[id] then return before + i - 1 end
      end
      if id and visit then visit(id, before + i, before + i) end
    end
    at = at + 8 * #members
    local last = ids[#ids]
    local size = following(text, at, keys[last], members[#members])
    if size > 0 and visit then visit(last, (at + 7) / 8, (at + size - 1) / 8) end
    at, most = at + size, size >= 64 and 1 or math.min(2 * most, 256)
  end
  return #text / 8
end
"""
_RUN: Final = (
    _HEADS
    + _CUT
    + """
-- A run is parsed into lists by position; `codec` in run_codec.py says how it is stored.
local RETIRED = 8589934592

local function count_of(value) return string.byte(value, 10) end
local function keys_of(value) return string.sub(value, 11, 10 + 8 * count_of(value)) end
local function headers_at(value) return 11 + 24 * count_of(value) end
local function headers_of(value)
  local at = headers_at(value)
  return string.sub(value, at + 4, at + 3 + struct.unpack('>I4', value, at))
end

local function parse(value)
  local n = count_of(value)
  local headers = headers_of(value)
  local at = headers_at(value)
  local run = {
    stamp = string.sub(value, 2, 9),
    headers = headers,
    keys = cut(keys_of(value), 8),
    parents = cut(string.sub(value, 11 + 8 * n, 10 + 16 * n), 8),
    depths = cut(string.sub(value, 11 + 16 * n, 10 + 20 * n), 4),
    sizes = cut(string.sub(value, 11 + 20 * n, 10 + 24 * n), 4),
    bodies = {},
  }
  at = at + 4 + #headers
  for i = 1, n do
    local size = struct.unpack('>I4', run.sizes[i])
    run.bodies[i] = string.sub(value, at, at + size - 1)
    at = at + size
  end
  return run
end

local function picked(list, positions)
  local items = {}
  for n, i in ipairs(positions) do items[n] = list[i] end
  return table.concat(items)
end

local function packed(run, positions, stamp, headers)
  return table.concat({
    '\\2', stamp, string.char(#positions), picked(run.keys, positions), picked(run.parents, positions),
    picked(run.depths, positions), picked(run.sizes, positions), struct.pack('>I4', #headers), headers,
    picked(run.bodies, positions)
  })
end

local function size_of(body) return struct.pack('>I4', #body) end

local function with_headers(value, stamp, headers, bodies)
  local at = headers_at(value)
  local columns, rest
  if bodies then
    local sizes = {}
    for i, body in ipairs(bodies) do sizes[i] = size_of(body) end
    columns = string.sub(value, 10, at - 1 - 4 * #bodies) .. table.concat(sizes)
    rest = table.concat(bodies)
  else
    columns = string.sub(value, 10, at - 1)
    rest = string.sub(value, at + 4 + struct.unpack('>I4', value, at))
  end
  return table.concat({'\\2', stamp, columns, size_of(headers), headers, rest})
end

-- Adds +1 or -1 for each relation of a parent with a block that does not follow it within the run.
local function relate(relations, run, positions, sign)
  local before
  for _, i in ipairs(positions) do
    if string.byte(run.depths[i]) < 128 and run.parents[i] ~= before then
      local member = run.parents[i] .. run.keys[i]
      relations[member] = (relations[member] or 0) + sign
    end
    before = run.keys[i]
  end
end

-- The same for all blocks of a run that is not parsed. Mostly each follows the one before.
local function relate_whole(relations, value, sign)
  local n = count_of(value)
  local keys, parents = keys_of(value), string.sub(value, 11 + 8 * n, 10 + 16 * n)
  local last = string.sub(parents, 9) == string.sub(keys, 1, -9) and 1 or n
  for i = 1, last do
    local parent = string.sub(parents, 8 * i - 7, 8 * i)
    local follows = i > 1 and parent == string.sub(keys, 8 * i - 15, 8 * i - 8)
    if not follows and string.byte(value, 7 + 16 * n + 4 * i) < 128 then
      local member = parent .. string.sub(keys, 8 * i - 7, 8 * i)
      relations[member] = (relations[member] or 0) + sign
    end
  end
end

local function every(run)
  local positions = {}
  for i = 1, #run.keys do positions[i] = i end
  return positions
end

-- Runs a command of one key with any number of arguments, which come in pairs or one by one.
local function call(command, key, list)
  for at = 1, #list, 4000 do redis.call(command, key, unpack(list, at, math.min(at + 3999, #list))) end
end

local function store(list)
  for at = 1, #list, 4000 do redis.call('MSET', unpack(list, at, math.min(at + 3999, #list))) end
end

local function store_relations(children, relations)
  local joined, left = {}, {}
  for member, sign in pairs(relations) do
    if sign > 0 then
      joined[#joined + 1] = 0
      joined[#joined + 1] = member
    elseif sign < 0 then
      left[#left + 1] = member
    end
  end
  call('ZADD', children, joined)
  call('ZREM', children, left)
end

-- Returns the values of runs by id, beside those that are known.
local function fetched(prefix, ids, known)
  local names, order, values = {}, {}, known or {}
  for _, id in pairs(ids) do
    if id and values[id] == nil then
      values[id] = false
      order[#order + 1] = id
      names[#names + 1] = prefix .. id
    end
  end
  if #names > 0 then
    for n, value in ipairs(redis.call('MGET', unpack(names))) do values[order[n]] = value end
  end
  return values, order
end

-- Returns the position of a block in a run, its parent, and whether that is the block before it.
local function place_of(value, key)
  local n, before = count_of(value)
  for i = 1, n do
    local each = string.sub(value, 3 + 8 * i, 10 + 8 * i)
    if each == key then
      if (string.byte(value, 7 + 16 * n + 4 * i) or 128) >= 128 then return i end  -- no parent, or cut off
      local parent = string.sub(value, 3 + 8 * (n + i), 10 + 8 * (n + i))
      return i, parent, parent == before
    end
    before = each
  end
end

-- Returns the id of a run: the number of its tag, which ends the names there, and its own.
local function id_of(usage, number)
  return struct.pack('>I8', number + 17592186044416 * string.match(usage, '(%d+)}$'))
end

local function new_ids(usage, number)
  local ids = {}
  if number > 0 then
    local last = redis.call('HINCRBY', usage, '@', number)
    for n = 1, number do ids[n] = id_of(usage, last - number + n) end
  end
  return ids
end
"""
)

_CHANGE: Final = (
    _FENCE
    + _RUN
    + _NOTICES
    + """
-- KEYS: access order, children, pending, usage, index, what names of runs begin with, whether the tag changed, fence.
-- ARGV[1]: packed groups of blocks that are to change alike, each
--   {what a block must have: a stamp, zeros for no record, or else headers; number of an argument; whether that is a
--    run to store, else keys of blocks; headers to set, false to keep those of the run, '' to remove; new stamp;
--    score: number to set, true to retire the blocks, false to leave it; due time or false;
--    fields of usage; what each block adds to them; whether the blocks are resident, as they are; whether they become
--    resident; bodies to set, nil to keep those of the run}.
-- ARGV[2]: 1 if the answer is 0 where a block lost, else the turn of the tag that this call is.
-- ARGV[3]: number of the move that makes the change, '' for none.
-- Returns that answer, 0 when all blocks lost, then the indexes of those that were something else than expected.
local order, children, pending, usage, index, prefix, changed = unpack(KEYS)
check_fence(KEYS[8], ARGV[3])
local groups = cmsgpack.unpack(ARGV[1])
local ABSENT = '\\0\\0\\0\\0\\0\\0\\0\\0'
local texts, starts, size, firsts, of_firsts = {}, {}, 0, {}, {}
for g, group in ipairs(groups) do
  local text = ARGV[group[2]]
  texts[g] = group[3] and keys_of(text) or text
  starts[g] = size
  size = size + #texts[g] / 8
  if group[1] ~= ABSENT then
    firsts[#firsts + 1] = string.sub(texts[g], 1, 8)
    of_firsts[#of_firsts + 1] = g
  end
end

local function fits(value, expected)
  if #expected == 8 then return string.sub(value, 2, 9) == expected end
  return headers_of(value) == expected
end

-- Mostly a group is a whole run: then the index is read for its first block alone.
local wholes = {}  -- by number of a group: id of the run
local first_ids = #firsts > 0 and redis.call('HMGET', index, unpack(firsts)) or {}
local values = fetched(prefix, first_ids)
for n, g in ipairs(of_firsts) do
  local id = first_ids[n]
  if id and values[id] and keys_of(values[id]) == texts[g] and fits(values[id], groups[g][1]) then wholes[g] = id end
end
local all, ids, searched = {}, {}, {}  -- of the other groups, the first two by position among the blocks of all groups
for g in ipairs(groups) do
  for n, key in ipairs(wholes[g] and {} or cut(texts[g], 8)) do
    all[starts[g] + n] = key
    searched[#searched + 1] = key
  end
end
if #searched > 0 then
  local found, n = redis.call('HMGET', index, unpack(searched)), 0
  for g in ipairs(groups) do
    for i = starts[g] + 1, wholes[g] and 0 or starts[g] + #texts[g] / 8 do
      n = n + 1
      ids[i] = found[n]
    end
  end
  fetched(prefix, found, values)
end
local fresh = {}        -- new runs: {value, score, due}
local kept = {}         -- by id: {value, score, due} of a run that changes as a whole, false if it goes
local taken = {}        -- by id: positions of blocks that leave their run
local parsed = {}
local relations, totals, lost = {}, {}, {}
local won, removed = 0, 0
local scores, dues = {}, {}

local function run_of(id)
  parsed[id] = parsed[id] or parse(values[id])
  return parsed[id]
end

local function count(group, number)
  won = won + number
  for n, field in ipairs(group[8]) do totals[field] = (totals[field] or 0) + number * group[9][n] end
end

local function score_from(id, wanted)
  if type(wanted) == 'number' then return wanted end
  scores[id] = scores[id] or tonumber(redis.call('ZSCORE', order, id) or 0)
  if wanted and scores[id] < RETIRED then return scores[id] + RETIRED end
  return scores[id]
end

local function change_whole(group, id)
  local value, text = values[id], ARGV[group[2]]
  count(group, count_of(value))
  if group[4] == '' then
    removed = removed + count_of(value)
    relate_whole(relations, value, -1)
    kept[id] = false
    return
  end
  if not group[3] then
    kept[id] = {with_headers(value, group[5], group[4], group[12]), group[6], group[7]}
    return
  end
  kept[id] = {text, group[6], group[7]}
  local n = count_of(value)
  if string.sub(value, 11 + 8 * n, 10 + 20 * n) ~= string.sub(text, 11 + 8 * n, 10 + 20 * n) then
    relate_whole(relations, value, -1)
    relate_whole(relations, text, 1)
  end
end

local function add_run(run, positions, stamp, headers, score, due)
  fresh[#fresh + 1] = {packed(run, positions, stamp, headers), score, due}
  relate(relations, run, positions, 1)
end

local function change_some(group, g, size)
  local text = ARGV[group[2]]
  local new = group[3] and parse(text)
  local coming, by_id = {}, {}
  for i = 1, size do
    local id = ids[starts[g] + i]
    local value = id and values[id]
    local at = value and find(keys_of(value), all[starts[g] + i])
    if not at then
      if group[1] == ABSENT then coming[#coming + 1] = i else lost[#lost + 1] = starts[g] + i end
    elseif fits(value, group[1]) then
      by_id[id] = by_id[id] or {}
      table.insert(by_id[id], {i, (at + 7) / 8})
    else
      lost[#lost + 1] = starts[g] + i
    end
  end
  if #coming > 0 then
    count(group, #coming)
    if new then add_run(new, coming, new.stamp, new.headers, group[6], group[7]) end
  end
  for id, pairs_of_it in pairs(by_id) do
    count(group, #pairs_of_it)
    local here, there = {}, {}
    taken[id] = taken[id] or {}
    for n, pair in ipairs(pairs_of_it) do
      here[n], there[n] = pair[1], pair[2]
      taken[id][pair[2]] = true
    end
    if group[4] == '' then
      removed = removed + #there
    elseif new then
      add_run(new, here, new.stamp, new.headers, score_from(id, group[6]), group[7])
    else
      local run = run_of(id)
      for n, pair in ipairs(group[12] and pairs_of_it or {}) do
        run.bodies[pair[2]] = group[12][pair[1]]
        run.sizes[pair[2]] = size_of(group[12][pair[1]])
      end
      table.sort(there)
      add_run(run, there, group[5], group[4], score_from(id, group[6]), group[7])
    end
  end
end

local function begin_whole(group, size)
  local text = ARGV[group[2]]
  count(group, size)
  fresh[#fresh + 1] = {text, group[6], group[7]}
  relate_whole(relations, text, 1)
end

for g, group in ipairs(groups) do
  local size = #texts[g] / 8
  local is_new = group[3] and group[1] == ABSENT
  for i = 1, is_new and size or 0 do
    is_new = is_new and not ids[starts[g] + i]
  end
  if is_new then
    begin_whole(group, size)
  elseif wholes[g] then
    change_whole(group, wholes[g])
  else
    change_some(group, g, size)
  end
end
if won == 0 then return {0, unpack(lost)} end

for id, positions in pairs(taken) do
  local run, rest = run_of(id), {}
  for i = 1, #run.keys do
    if not positions[i] then rest[#rest + 1] = i end
  end
  relate(relations, run, every(run), -1)
  relate(relations, run, rest, 1)
  kept[id] = #rest > 0 and {packed(run, rest, run.stamp, run.headers)} or false
end
local names = new_ids(usage, #fresh)
local stored, gone, placed, forgotten, ordered, unordered, waiting, done = {}, {}, {}, {}, {}, {}, {}, {}

local function place(id, score, due)
  if type(score) == 'number' then
    ordered[#ordered + 1] = score
    ordered[#ordered + 1] = id
  end
  if due then
    waiting[#waiting + 1] = due
    waiting[#waiting + 1] = id
  elseif due == false then
    done[#done + 1] = id
  end
end

for n, each in ipairs(fresh) do
  stored[#stored + 1] = prefix .. names[n]
  stored[#stored + 1] = each[1]
  place(names[n], each[2], each[3] or nil)
  local keys = keys_of(each[1])
  for at = 1, #keys, 8 do
    placed[#placed + 1] = string.sub(keys, at, at + 7)
    placed[#placed + 1] = names[n]
  end
end
for id, each in pairs(kept) do
  if each then
    stored[#stored + 1] = prefix .. id
    stored[#stored + 1] = each[1]
    if each[2] ~= nil then
      place(id, each[2] and score_from(id, each[2]) or nil, each[3])
    end
  else
    gone[#gone + 1] = prefix .. id
    unordered[#unordered + 1] = id
    done[#done + 1] = id
  end
end
if removed > 0 then
  for g, group in ipairs(groups) do
    if group[4] == '' then
      for _, key in ipairs(cut(texts[g], 8)) do forgotten[key] = true end
    end
  end
  for _, i in ipairs(lost) do forgotten[all[i]] = nil end
  local fields = {}
  for key in pairs(forgotten) do fields[#fields + 1] = key end
  forgotten = fields
end
local stale, served = {}, {}
for g, group in ipairs(groups) do
  if group[10] then stale[#stale + 1] = texts[g] end
  if group[11] then served[#served + 1] = texts[g] end
end
if #stale > 0 then notify_stale(prefix, table.concat(stale)) end
if #served > 0 then notify_served(prefix, served) end
store(stored)
notify_changed(changed)
if #gone > 0 then redis.call('UNLINK', unpack(gone)) end
call('HSET', index, placed)
if removed > 0 then call('HDEL', index, forgotten) end
call('ZADD', order, ordered)
call('ZREM', order, unordered)
call('ZADD', pending, waiting)
call('ZREM', pending, done)
store_relations(children, relations)
for field, total in pairs(totals) do
  if total ~= 0 then redis.call('HINCRBY', usage, field, string.format('%.0f', total)) end
end
local turn = redis.call('HINCRBY', usage, '#', 1)
if ARGV[2] == '1' then turn = #lost == 0 and 1 or 0 end
return {turn, unpack(lost)}
"""
)
CHANGE: Final = Script(_CHANGE, creates=True)
SHRINK: Final = Script(_CHANGE, allow_oom=True)
"""The same, of blocks that are there already."""
SERVE: Final = Script(_CHANGE, allow_oom=True, guards=True)

_RESCORE: Final = (
    _RUN
    + _WALK
    + """
-- KEYS: access order, children, pending, usage, index, what names of runs begin with, whether the tag changed.
-- ARGV: unix seconds; `how`; keys of blocks; packed number of reads of each, or one for all; how many runs to cut at
-- most.
-- Blocks of a run are always read alike: where they were not, the run is cut.
-- Returns how many of the keys were looked up, not all where that takes more than 96 runs; then the keys of blocks of
-- runs that were left, since more had to be cut.
local order, children, pending, usage, index, prefix = unpack(KEYS)
local at, how, text, counts = tonumber(ARGV[1]), ARGV[2], ARGV[3], cmsgpack.unpack(ARGV[4])

local function rescored(score, reads)
  local retired = score < RETIRED and 0 or RETIRED
  if how == 'set' then
    return retired == 0 and at + math.min(reads, 4095) / 4096 or score
  end
  local seconds = math.floor(score) - retired
  local before = math.floor((score % 1) * 4096 + 0.5)
  return retired + math.max(seconds, how == 'move' and at or 0) + math.min(before + reads, 4095) / 4096
end

local heads, parts, listed = {}, {}, {}  -- by id: keys of the run, positions of first and last keys of it in turn

local function open(id)
  if not id then return '' end
  if #listed == 96 then return nil end
  listed[#listed + 1] = id
  heads[id], parts[id] = keys_at(prefix .. id), {}
  return heads[id]
end

local function visit(id, first, last)
  local part = parts[id]
  if part[#part] == first - 1 then
    part[#part] = last
  else
    part[#part + 1] = first
    part[#part + 1] = last
  end
end

local function count_at(position) return type(counts) == 'number' and counts or counts[position] end

-- Returns how often all blocks of a run were read, nil where that differs.
local function reads_of_all(id)
  local first, last = unpack(parts[id])
  if #parts[id] > 2 or 8 * (last - first + 1) ~= #heads[id] then return end
  if string.find(text, heads[id], 8 * first - 7, true) ~= 8 * first - 7 then return end
  for position = first + 1, type(counts) == 'number' and first or last do
    if counts[position] ~= counts[first] then return end
  end
  return count_at(first)
end

-- Returns how often each block of a run was read, by key.
local function reads_of_each(id)
  local reads = {}
  for n = 1, #parts[id], 2 do
    for position = parts[id][n], parts[id][n + 1] do
      reads[string.sub(text, 8 * position - 7, 8 * position)] = count_at(position)
    end
  end
  return reads
end

local visited = walk(index, text, open, visit)
if #listed == 0 then return {visited} end
local scores = redis.call('ZMSCORE', order, unpack(listed))
local ordered, apart, left, most = {}, {}, {visited}, tonumber(ARGV[5])

local function reorder(id, old, new)
  if old ~= new then
    ordered[#ordered + 1] = new
    ordered[#ordered + 1] = id
  end
end

local function rescore_some(id, score)
  local segments, reads = {}, reads_of_each(id)
  for i, key in ipairs(cut(heads[id], 8)) do
    local new = reads[key] and rescored(score, reads[key]) or score
    if not segments[1] or segments[#segments].score ~= new then
      segments[#segments + 1] = {score = new, positions = {}}
    end
    table.insert(segments[#segments].positions, i)
  end
  if #segments == 1 then
    reorder(id, score, segments[1].score)
  elseif #segments > 1 then
    apart[id] = segments
    most = most - 1
  end
end

for n, id in ipairs(listed) do
  local score = tonumber(scores[n] or nil)
  local reads = score and reads_of_all(id)
  if reads then
    reorder(id, score, rescored(score, reads))
  elseif score and most > 0 then
    rescore_some(id, score)
  elseif score then
    for key in pairs(reads_of_each(id)) do left[#left + 1] = key end
  end
end

local cut_ids = {}
for id in pairs(apart) do cut_ids[#cut_ids + 1] = id end
local values = fetched(prefix, cut_ids)
local dues, number, relations = {}, 0, {}
for id, segments in pairs(apart) do
  dues[id] = redis.call('ZSCORE', pending, id)
  number = number + #segments - 1
end
local names, stored, placed, waiting = new_ids(usage, number), {}, {}, {}
local used = 0
for id, segments in pairs(apart) do
  local run = parse(values[id])
  relate(relations, run, every(run), -1)
  for n, segment in ipairs(segments) do
    local name = id
    if n > 1 then
      used = used + 1
      name = names[used]
      for _, i in ipairs(segment.positions) do
        placed[#placed + 1] = run.keys[i]
        placed[#placed + 1] = name
      end
      if dues[id] then
        waiting[#waiting + 1] = dues[id]
        waiting[#waiting + 1] = name
      end
    end
    relate(relations, run, segment.positions, 1)
    stored[#stored + 1] = prefix .. name
    stored[#stored + 1] = packed(run, segment.positions, run.stamp, run.headers)
    ordered[#ordered + 1] = segment.score
    ordered[#ordered + 1] = name
  end
end
store(stored)
call('HSET', index, placed)
call('ZADD', order, ordered)
call('ZADD', pending, waiting)
store_relations(children, relations)
return left
"""
)
TOUCH: Final = Script(_RESCORE)
REQUEUE: Final = Script(_RESCORE, allow_oom=True)

READ: Final = Script(
    _FENCE
    + _CUT
    + _WALK
    + """
-- KEYS: index, what names of runs begin with, access order, fence. ARGV: keys of blocks, one after the other; 1 to end
-- at a block that is not there, or that the first run has and that cannot be read.
-- Returns how many of the keys were looked up, not all where that takes more than 32 runs; then every run that holds
-- some of them.
check_present(KEYS[4])
local found, runs, most = {0}, 0, 32
local stops, is_over = ARGV[2] == '1', false

local function open(id)
  if not id and not stops then return '' end
  if not id or runs == most then
    is_over = not id or most == 1
    return nil
  end
  runs = runs + 1
  if stops and runs == 1 and tonumber(redis.call('ZSCORE', KEYS[3], id) or 0) >= 8589934592 then most = 1 end
  local value = redis.call('GET', KEYS[2] .. id)
  if not value then return '' end
  found[#found + 1] = value
  return string.sub(value, 11, 10 + 8 * math.min(string.byte(value, 10) or 0, math.floor((#value - 10) / 8)))
end

found[1] = walk(KEYS[1], ARGV[1], open)
if is_over then found[1] = #ARGV[1] / 8 end
return found
"""
)
AROUND: Final = Script(
    _FENCE
    + """
-- KEYS: index, what names of runs begin with, children, access order, fence. ARGV: how many blocks to read; keys of
-- blocks.
-- Returns for how many keys that was enough, then score and run of each, and then the runs that follow their last
-- blocks.
check_present(KEYS[5])
local found, seen, most = {0}, {}, tonumber(ARGV[1])

local function last_of_run(key)
  local id = redis.call('HGET', KEYS[1], key)
  local value = id and not seen[id] and redis.call('GET', KEYS[2] .. id)
  if not value then return nil end
  seen[id] = true
  found[#found + 1] = redis.call('ZSCORE', KEYS[4], id)
  found[#found + 1] = value
  local size = 8 * (string.byte(value, 10) or 0)
  most = most - size / 8
  return size > 0 and string.sub(value, 3 + size, 10 + size)
end

local lasts = {}
for n = 2, #ARGV do
  lasts[#lasts + 1] = last_of_run(ARGV[n]) or nil
  found[1] = n - 1
  if most <= 0 then break end
end
for _, last in ipairs(lasts) do
  while last and most > 0 do
    local first = redis.call('ZRANGEBYLEX', KEYS[3], '[' .. last, '[' .. last .. string.rep('\\255', 8), 'LIMIT', 0, 1)
    last = first[1] and last_of_run(string.sub(first[1], 9))
  end
end
return found
"""
)
PLACES: Final = Script("""
-- KEYS: access order, index. ARGV: keys of blocks. Returns the score of each block's run.
local ids, listed, at = redis.call('HMGET', KEYS[2], unpack(ARGV)), {}, {}
for _, id in ipairs(ids) do
  if id and not at[id] then
    listed[#listed + 1] = id
    at[id] = #listed
  end
end
local scores, found = #listed > 0 and redis.call('ZMSCORE', KEYS[1], unpack(listed)) or {}, {}
for i, id in ipairs(ids) do found[i] = id and scores[at[id]] or false end
return found
""")
KEYS: Final = Script(
    _HEADS
    + """
-- KEYS: what names of runs begin with. ARGV: ids of runs. Returns the keys of each, '' where it is gone.
local found = {}
for n, id in ipairs(ARGV) do found[n] = keys_at(KEYS[1] .. id) end
return found
"""
)
NEWER: Final = Script(
    _FENCE
    + _RUN
    + """
-- KEYS: usage, what names of runs begin with, fence. ARGV: number of a run; how many to read at most.
-- Returns the number of the last run that was read; 1 if that is the last that there is, else 0; then the keys of each
-- run with a greater number.
check_present(KEYS[3])
local first, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local newest = tonumber(redis.call('HGET', KEYS[1], '@') or 0)
local last = math.min(newest, first + most)
local found = {last, last == newest and 1 or 0}
for number = first + 1, last do
  local keys = keys_at(KEYS[2] .. id_of(KEYS[1], number))
  if keys ~= '' then found[#found + 1] = keys end
end
return found
"""
)
STRAY: Final = Script(
    _HEADS
    + """
-- KEYS: index, what names of runs begin with. ARGV: keys of blocks.
-- Returns those that the index knows, and that are not in the run that it leads to.
local heads, found = {}, {}
for i, id in ipairs(redis.call('HMGET', KEYS[1], unpack(ARGV))) do
  if id then
    heads[id] = heads[id] or keys_at(KEYS[2] .. id)
    if not find(heads[id], ARGV[i]) then found[#found + 1] = ARGV[i] end
  end
end
return found
"""
)
FAMILIES: Final = Script(
    _RUN
    + """
-- KEYS: children, index, what names of runs begin with. ARGV: keys of parents.
-- Returns for each what stands of its family, parent and child, one relation after the other; not for all where that
-- takes more than 32 runs.
local ids = redis.call('HMGET', KEYS[2], unpack(ARGV))
local last, runs, seen = #ARGV, {}, {}
for i, id in ipairs(ids) do
  if id and not seen[id] then
    if #runs == 32 then
      last = i - 1
      break
    end
    seen[id] = true
    runs[#runs + 1] = id
  end
end
local values = fetched(KEYS[3], runs)
local families, keys = {}, {}
for id, value in pairs(values) do keys[id] = value and keys_of(value) end
for n = 1, last do
  local parent = ARGV[n]
  local first, last = '[' .. parent .. string.rep('\\0', 8), '[' .. parent .. string.rep('\\255', 8)
  local family = table.concat(redis.call('ZRANGEBYLEX', KEYS[1], first, last))
  local value = ids[n] and values[ids[n]]
  if value then
    local size = 8 * count_of(value)
    local at = find(keys[ids[n]], parent)
    if at and at < size - 8 and string.sub(value, 18 + size + at, 25 + size + at) == parent
      and string.byte(value, 15 + 2 * size + (at - 1) / 2) < 128 then
      family = family .. parent .. string.sub(value, 18 + at, 25 + at)
    end
  end
  families[n] = family
end
return families
"""
)
OUTER_FAMILIES: Final = Script(
    _CUT
    + """
-- KEYS: children. ARGV: how many children to read of a block at most; keys of the blocks of a run, one after the other,
-- again and again.
-- Returns for each run parent and child of every relation of its blocks with one that does not follow within a run.
local families, last = {}, string.rep('\\255', 8)
for n = 2, #ARGV do
  local family = {}
  for _, parent in ipairs(cut(ARGV[n], 8)) do
    local from = '[' .. parent
    local found = redis.call('ZRANGEBYLEX', KEYS[1], from, from .. last, 'LIMIT', '0', ARGV[1])
    for _, relation in ipairs(found) do family[#family + 1] = relation end
  end
  families[n - 1] = table.concat(family)
end
return families
"""
)
COLDEST_RUNS: Final = Script("""
-- KEYS: access order, what names of runs begin with. ARGV: how many blocks; how many come before them.
-- Returns score and value of the runs that they lie in, those left out that cannot be evicted.
local most, skip, found, rank = tonumber(ARGV[1]), tonumber(ARGV[2]), {}, 0
while most > 0 do
  local page = redis.call('ZRANGE', KEYS[1], rank, rank + 15, 'WITHSCORES')
  if #page == 0 then break end
  for n = 1, #page, 2 do
    if tonumber(page[n + 1]) >= 8589934592 or most <= 0 then return found end
    local name = KEYS[2] .. page[n]
    local size = string.byte(skip > 0 and redis.call('GETRANGE', name, 9, 9) or '')
    if size and skip >= size then
      skip = skip - size
    else
      local value = redis.call('GET', name)
      if value then
        found[#found + 1] = page[n + 1]
        found[#found + 1] = value
        most, skip = most - (string.byte(value, 10) or 0), 0
      end
    end
  end
  rank = rank + 16
end
return found
""")
COLDEST: Final = Script(
    _HEADS
    + """
-- KEYS: access order, what names of runs begin with. ARGV: how many blocks; how many come before them.
-- Returns key and score of each, blocks that cannot be evicted left out. Of a run the last block comes first.
local most, skip, found, rank = tonumber(ARGV[1]), tonumber(ARGV[2]), {}, 0
while #found < 2 * most do
  local page = redis.call('ZRANGE', KEYS[1], rank, rank + 31, 'WITHSCORES')
  if #page == 0 then break end
  for n = 1, #page, 2 do
    if tonumber(page[n + 1]) >= 8589934592 or #found >= 2 * most then return found end
    local keys = keys_at(KEYS[2] .. page[n])
    local size = #keys / 8
    if skip >= size then
      skip = skip - size
    else
      for i = size - skip, 1, -1 do
        if #found >= 2 * most then break end
        found[#found + 1] = string.sub(keys, 8 * i - 7, 8 * i)
        found[#found + 1] = page[n + 1]
      end
      skip = 0
    end
  end
  rank = rank + 32
end
return found
"""
)
SAMPLE: Final = Script(
    _HEADS
    + """
-- KEYS: access order, what names of runs begin with. ARGV: rank of a run and position in it, again and again.
-- Returns the keys of the blocks that are there.
local sample = {}
for n = 1, #ARGV, 2 do
  local id = redis.call('ZRANGE', KEYS[1], ARGV[n], ARGV[n])[1]
  local keys, position = id and keys_at(KEYS[2] .. id) or '', tonumber(ARGV[n + 1])
  if 8 * position <= #keys then sample[#sample + 1] = string.sub(keys, 8 * position - 7, 8 * position) end
end
return sample
"""
)
SAMPLE_RUNS: Final = Script("""
-- KEYS: access order, what names of runs begin with. ARGV: ranks of runs.
-- Returns score and value of those that can be evicted.
local found = {}
for _, rank in ipairs(ARGV) do
  local run = redis.call('ZRANGE', KEYS[1], rank, rank, 'WITHSCORES')
  local value = run[1] and tonumber(run[2]) < 8589934592 and redis.call('GET', KEYS[2] .. run[1])
  if value then
    found[#found + 1] = run[2]
    found[#found + 1] = value
  end
end
return found
""")
AUDIT: Final = Script(
    _RUN
    + """
-- KEYS: access order, children, pending, index, what names of runs begin with.
-- ARGV: key of a block, id of a run or '' where it may be if the index does not know it, 8 bytes for each block whose
-- child it may be; again and again.
-- Returns for every key the id of its run, whether the index knows that, and 8 bytes for each of these whose child it
-- is, and for the parent in the run; then id, value, score and due time of every run.
local order, children, pending, index, prefix = unpack(KEYS)
local ids, is_known, places, runs = {}, {}, {}, {}
for n = 1, #ARGV / 3 do
  local id = redis.call('HGET', index, ARGV[3 * n - 2])
  is_known[n] = id and 1 or 0
  ids[n] = id or ARGV[3 * n - 1] ~= '' and ARGV[3 * n - 1]
end
local values, listed = fetched(prefix, ids)
local parsed = {}
for n = 1, #ARGV / 3 do
  local key, value, found = ARGV[3 * n - 2], ids[n] and values[ids[n]], {}
  local candidates, own, inner = cut(ARGV[3 * n], 8)
  if value and string.byte(value) == 2 then
    local _
    _, own, inner = place_of(value, key)
    candidates[#candidates + 1] = own
  end
  local is_stored = {}
  for _, parent in ipairs(candidates) do
    if redis.call('ZSCORE', children, parent .. key) then is_stored[parent] = true end
  end
  -- What follows from the run must not be stored too: of such a block the parent is left out, which is a fault.
  if inner then is_stored[own] = not is_stored[own] or nil end
  for parent in pairs(is_stored) do found[#found + 1] = parent end
  places[n] = {ids[n], is_known[n], table.concat(found)}
end
for _, id in ipairs(listed) do
  runs[#runs + 1] = id
  runs[#runs + 1] = values[id]
  runs[#runs + 1] = redis.call('ZSCORE', order, id)
  runs[#runs + 1] = redis.call('ZSCORE', pending, id)
end
return {places, runs}
"""
)
MEND: Final = Script(
    _RUN
    + _NOTICES
    + """
-- KEYS: access order, children, pending, usage, index, what names of runs begin with, whether the tag changed.
-- ARGV: key of a block; id of a run or ''; stamp of the run that was judged, zeros for no block; score if its run is
-- not in the order; due time or ''; parents whose child it is not; what the score of a run that cannot be evicted has
-- more.
local order, children, pending, _, index, prefix, changed = unpack(KEYS)
local key, none = ARGV[1], '\\0\\0\\0\\0\\0\\0\\0\\0'
local known = redis.call('HGET', index, key)
local id = known or ARGV[2]
local value = id ~= '' and redis.call('GET', prefix .. id)
local at, parent, inner
if value and string.byte(value) == 2 then at, parent, inner = place_of(value, key) end
if (at and string.sub(value, 2, 9) or none) ~= ARGV[3] then return 0 end
notify_stale(prefix, key)
notify_changed(changed)
if not at then
  if known then redis.call('HDEL', index, key) end
  if ARGV[2] ~= '' and not value then
    redis.call('ZREM', order, id)
    redis.call('ZREM', pending, id)
  end
else
  redis.call('HSET', index, key, id)
  local score = tonumber(redis.call('ZSCORE', order, id) or ARGV[4])
  redis.call('ZADD', order, score % RETIRED + tonumber(ARGV[7]), id)
  if ARGV[5] == '' then redis.call('ZREM', pending, id) else redis.call('ZADD', pending, ARGV[5], id) end
  if parent and inner then redis.call('ZREM', children, parent .. key) end
  if parent and not inner then redis.call('ZADD', children, 0, parent .. key) end
end
for _, other in ipairs(cut(ARGV[6], 8)) do redis.call('ZREM', children, other .. key) end
return 1
"""
)
DROP_RUN: Final = Script(
    _NOTICES
    + """
-- KEYS: access order, children, pending, usage, index, what names of runs begin with, whether the tag changed.
-- ARGV: key of a block; its run; id of the run where the block may be if the index does not know it, or ''.
-- Forgets the block; with the first one of a run that cannot be read that run, too.
local id = redis.call('HGET', KEYS[5], ARGV[1]) or ARGV[3] ~= '' and ARGV[3]
local value = id and redis.call('GET', KEYS[6] .. id)
if not id or value and value ~= ARGV[2] then return 0 end
notify_stale(KEYS[6], ARGV[1])
notify_changed(KEYS[7])
redis.call('HDEL', KEYS[5], ARGV[1])
redis.call('UNLINK', KEYS[6] .. id)
redis.call('ZREM', KEYS[1], id)
redis.call('ZREM', KEYS[3], id)
return 1
"""
)
TOTALS: Final = Script(
    _FENCE
    + """
-- KEYS: index, usage, fence. Returns how many blocks there are, and fields and values of the sums, at one moment.
check_present(KEYS[3])
return {redis.call('HLEN', KEYS[1]), redis.call('HGETALL', KEYS[2])}
"""
)
LISTING: Final = Script(
    _HEADS
    + """
-- KEYS: what names of runs begin with. ARGV: ids of runs. Returns stamp and keys of each, '' where it is gone.
local found = {}
for n, id in ipairs(ARGV) do
  local keys = keys_at(KEYS[1] .. id)
  found[n] = keys ~= '' and redis.call('GETRANGE', KEYS[1] .. id, 1, 8) .. keys or ''
end
return found
"""
)
DROP: Final = Script(
    _FENCE
    + _HEADS
    + """
-- KEYS: access order, children, pending, usage, index, what names of runs begin with, whether the tag changed, fence.
-- ARGV: how many runs; number of the move that drops them, '' for none.
-- Forgets some runs; the rest goes with the last of them, and the fence unless it is of the move. Returns how many runs
-- are left.
if redis.call('GET', KEYS[8]) ~= ARGV[2] .. ' left' then check_fence(KEYS[8], ARGV[2]) end
local ids, names, keys = redis.call('ZRANGE', KEYS[1], 0, tonumber(ARGV[1]) - 1), {}, {}
for n, id in ipairs(ids) do
  names[n] = KEYS[6] .. id
  local text = keys_at(names[n])
  for at = 1, #text, 8 do keys[#keys + 1] = string.sub(text, at, at + 7) end
end
if #ids > 0 then
  redis.call('UNLINK', unpack(names))
  if #keys > 0 then redis.call('HDEL', KEYS[5], unpack(keys)) end
  redis.call('ZREM', KEYS[1], unpack(ids))
end
local left = redis.call('ZCARD', KEYS[1])
if left == 0 then redis.call('UNLINK', KEYS[7], unpack(KEYS, 1, 5)) end
if left == 0 and ARGV[2] == '' then redis.call('UNLINK', KEYS[8]) end
return left
"""
)
SET_FENCE: Final = Script(
    _FENCE
    + """
-- KEYS: fence. ARGV: number of a move; state; seconds after which it is forgotten, 0 for never.
local fence = redis.call('GET', KEYS[1])
if fence and tonumber(string.match(fence, '^%d+')) > tonumber(ARGV[1]) then refuse(fence) end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2])
if ARGV[3] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[3]) end
return 1
""",
    allow_oom=True,
)
LIFT_FENCE: Final = Script(
    """
-- KEYS: fence. ARGV: number of a move that has ended: what it keeps waiting goes on.
if redis.call('GET', KEYS[1]) == ARGV[1] .. ' leaving' then redis.call('SET', KEYS[1], ARGV[1] .. ' live') end
return 1
""",
    allow_oom=True,
)
