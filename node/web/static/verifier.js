// Checks a run's log: run id, signatures, hash chain. Values in, values out; it fetches through a function that it is given.
// docs/protocol.md defines what is hashed and signed. WebCrypto does the work; without it, @noble/ed25519 and @noble/hashes do.
import * as ed from "./vendor/noble-ed25519.js";
import { sha256, sha512 } from "./vendor/noble-hashes/sha2.js";

ed.hashes.sha512 = sha512;
const text = new TextEncoder();
const GENESIS_DOMAIN = text.encode("swarmentum/v1/genesis\0");
const ENTRY_DOMAIN = text.encode("swarmentum/v1/entry\0");
const ENVELOPE_DOMAIN = text.encode("swarmentum/v1/envelope\0");
const KIND_LOG_ENTRY = 2;
const ENVELOPE_BYTES_MAX = 352 * 1024 + 256;
const CONTRIBUTIONS_MAX = 2048;
const AT_ONCE = 64;

// A value of the log that does not hold. `step`: of the entry, 0 for the run's definition.
export class DoesNotHold extends Error {
  constructor(step, why) {
    super(step === 0 ? `the run's definition does not hold: ${why}` : `entry ${step} does not hold: ${why}`);
    this.step = step;
  }
}

export function hex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function same(a, b) {
  return a.length === b.length && a.every((byte, index) => byte === b[index]);
}

function joined(...parts) {
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

// The fields of a protobuf message: [number, value], where value is bytes, or a BigInt for numbers. Throws for damaged bytes.
export function fields(data) {
  const found = [];
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      if (at >= data.length) throw new Error("a number is cut off");
      const byte = data[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asUintN(64, value);
    }
    throw new Error("a number is too long");
  };
  const taken = (count) => {
    if (count > data.length - at) throw new Error("a field is cut off");
    at += count;
    return data.subarray(at - count, at);
  };
  while (at < data.length) {
    const tag = varint();
    const number = Number(tag >> 3n);
    const wire = Number(tag & 7n);
    if (wire === 0) found.push([number, varint()]);
    else if (wire === 2) found.push([number, taken(Number(varint()))]);
    else if (wire === 1) found.push([number, taken(8)]);
    else if (wire === 5) found.push([number, taken(4)]);
    else throw new Error(`a field of an unknown type (${wire})`);
  }
  return found;
}

const EMPTY = new Uint8Array();

function bytesOf(all, number) {
  const value = all.findLast(([n]) => n === number)?.[1] ?? EMPTY;
  if (typeof value === "bigint") throw new Error(`field ${number} is no bytes`);
  return value;
}

function numberOf(all, number) {
  const value = all.findLast(([n]) => n === number)?.[1] ?? 0n;
  if (typeof value !== "bigint") throw new Error(`field ${number} is no number`);
  return value;
}

// {sha256, verifier(publicKey)}, of the browser where it has them, otherwise of the vendored library. `name` says which.
export async function crypts(subtle = globalThis.crypto?.subtle) {
  const plain = {
    name: "@noble/ed25519",
    sha256: async (data) => sha256(data),
    verifier: async (key) => async (signature, message) => {
      try {
        return ed.verify(signature, message, key, { zip215: false });
      } catch {
        return false;
      }
    },
  };
  if (!subtle) return plain;
  const own = { ...plain, sha256: async (data) => new Uint8Array(await subtle.digest("SHA-256", data)) };
  try {
    const point = joined(Uint8Array.of(0x58), new Uint8Array(31).fill(0x66)); // the base point: any valid key does
    await subtle.importKey("raw", point, { name: "Ed25519" }, false, ["verify"]);
  } catch {
    return own;
  }
  return {
    ...own,
    name: "WebCrypto",
    verifier: async (key) => {
      const imported = await subtle.importKey("raw", key, { name: "Ed25519" }, false, ["verify"]);
      return (signature, message) => subtle.verify({ name: "Ed25519" }, imported, signature, message);
    },
  };
}

// The coordinator's key, from a definition whose hash is the run id (64 hex digits). Throws DoesNotHold.
export async function keyOf(genesis, run, crypt) {
  if (hex(await crypt.sha256(joined(GENESIS_DOMAIN, genesis))) !== run) {
    throw new DoesNotHold(0, `its hash is not the run id ${run}`);
  }
  try {
    const key = bytesOf(fields(genesis), 3);
    if (key.length !== 32) throw new Error("it names no key");
    return key.slice();
  } catch (error) {
    throw new DoesNotHold(0, error.message);
  }
}

// The envelopes of a page of the log: records of a u32 length and that many bytes.
export function records(page) {
  const view = new DataView(page.buffer, page.byteOffset, page.byteLength);
  const found = [];
  for (let at = 0; at < page.length; ) {
    if (page.length - at < 4) throw new Error("the page of the log is cut off");
    const size = view.getUint32(at);
    if (size > ENVELOPE_BYTES_MAX || size > page.length - at - 4) throw new Error("a record of the log is cut off");
    found.push(page.subarray(at + 4, at + 4 + size));
    at += 4 + size;
  }
  return found;
}

const ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz";

// The libp2p spelling of a public key.
export function peerId(key) {
  const data = joined(Uint8Array.of(0x00, 0x24, 0x08, 0x01, 0x12, 0x20), key);
  let value = BigInt(`0x${hex(data)}`);
  let out = "";
  for (; value > 0n; value /= 58n) out = ALPHABET[Number(value % 58n)] + out;
  return "1" + out; // the one leading zero byte
}

// What an invite link names: {run, key} in hex. Throws Error with words for people.
export async function invited(link, crypt) {
  const found = /swarmentum(?:-anchor)?(?::|%3a)(?:\/|%2f){2}([^]*)/i.exec(link);
  if (!found) throw new Error("this is no invite link: it starts with swarmentum://");
  let coded = "";
  // As protos/invite.py: the link ends where its checksum holds. Line breaks may be in it, and words may follow it.
  for (const word of (found[1].match(/[\w-]+/g) ?? []).slice(0, WORDS_MAX)) {
    coded += word;
    const body = await checked(coded, crypt);
    if (!body) continue;
    const all = fields(body);
    return { run: hex(bytesOf(all, 1)), key: hex(bytesOf(all, 3)) };
  }
  throw new Error("the link is damaged or cut off; copy it again, whole");
}

const WORDS_MAX = 256;

// The bytes before the checksum; null if it does not hold.
async function checked(coded, crypt) {
  if (coded.length % 4 === 1) return null;
  const plain = atob(coded.replace(/-/g, "+").replace(/_/g, "/"));
  const data = Uint8Array.from(plain, (letter) => letter.charCodeAt(0));
  const body = data.subarray(0, -4);
  return data.length > 4 && same((await crypt.sha256(body)).subarray(0, 4), data.subarray(-4)) ? body : null;
}

// Follows a log from its first entry on, and adds up what the verified entries say.
export class LogVerifier {
  // `run`: 64 hex digits. `get(what, from)` resolves to the bytes of "genesis" or of the page of "log" at step `from`.
  constructor(run, get, crypt) {
    this.run = run;
    this.step = 0;
    this.votes = 0;
    this.tokens = 0n;
    this.bytes = 0n;
    this.accounts = new Map();
    this.key = null;
    this.crypt = crypt;
    this._get = get;
    this._runBytes = Uint8Array.from(run.match(/../g) ?? [], (pair) => parseInt(pair, 16));
    this.head = this._runBytes;
  }

  // Verify all entries that there are; `told` is called after each page. Throws DoesNotHold for the first that does not hold.
  async advance(told = () => {}) {
    if (this.key === null) {
      this.key = await keyOf(await this._get("genesis"), this.run, this.crypt);
      this._verify = await this.crypt.verifier(this.key);
    }
    for (;;) {
      const page = await this._get("log", this.step + 1);
      if (page.length === 0) return;
      let found;
      try {
        found = records(page);
      } catch (error) {
        throw new DoesNotHold(this.step + 1, error.message);
      }
      for (let at = 0; at < found.length; at += AT_ONCE) {
        await this._take(found.slice(at, at + AT_ONCE));
        told(this);
      }
    }
  }

  async _take(envelopes) {
    const first = this.step + 1;
    const opened = await Promise.all(envelopes.map((data, index) => this._open(data, first + index)));
    for (const entry of opened) {
      if (entry instanceof Error) throw entry;
      if (!same(entry.parent, this.head)) throw new DoesNotHold(this.step + 1, "it does not name the entry before it as its parent");
      this.step += 1;
      this.head = entry.hash;
      this._add(entry);
    }
  }

  // The entry, or the reason why it is none: the reason counts only once all entries before it hold.
  async _open(data, step) {
    try {
      const all = fields(data);
      const [kind, run, key] = [numberOf(all, 1), bytesOf(all, 2), bytesOf(all, 3)];
      const [body, signature] = [bytesOf(all, 4), bytesOf(all, 5)];
      if (kind !== BigInt(KIND_LOG_ENTRY)) throw new Error(`it is a message of kind ${kind}, not an entry`);
      if (!same(run, this._runBytes)) throw new Error("it belongs to another run");
      if (!same(key, this.key)) throw new Error("another key than the coordinator's signed it");
      if (signature.length !== 64) throw new Error("its signature has the wrong length");
      const message = joined(ENVELOPE_DOMAIN, Uint8Array.of(0, 0, 0, KIND_LOG_ENTRY), run, key, body);
      if (!(await this._verify(signature, message))) throw new Error("its signature is wrong");
      const entry = fields(body);
      if (numberOf(entry, 1) !== BigInt(step)) throw new Error(`it is the entry of step ${numberOf(entry, 1)}`);
      const contributions = entry.filter(([number]) => number === 3).map(([, value]) => fields(value));
      if (contributions.length > CONTRIBUTIONS_MAX) throw new Error("it has too many votes");
      const hash = await this.crypt.sha256(joined(ENTRY_DOMAIN, body));
      return { step, parent: bytesOf(entry, 2), hash, contributions };
    } catch (error) {
      return new DoesNotHold(step, error.message);
    }
  }

  _add(entry) {
    for (const one of entry.contributions) {
      const name = hex(bytesOf(one, 1));
      let account = this.accounts.get(name);
      if (account === undefined) {
        account = { id: peerId(bytesOf(one, 1)), votes: 0, samples: 0n, tokens: 0n, bytes: 0n, first: entry.step, last: 0 };
        this.accounts.set(name, account);
      }
      account.votes += 1;
      account.bytes += numberOf(one, 3);
      account.samples += numberOf(one, 4);
      account.tokens += numberOf(one, 5);
      account.last = entry.step;
      this.votes += 1;
      this.tokens += numberOf(one, 5);
      this.bytes += numberOf(one, 3);
    }
  }

  // What the verified entries add up to, for the page. Numbers beyond 2^53 lose their last digits.
  sums(accountsMax = 200) {
    const ordered = [...this.accounts.values()].sort((a, b) => b.votes - a.votes || (a.id < b.id ? -1 : 1));
    return {
      step: this.step,
      head: hex(this.head),
      key: this.key === null ? "" : hex(this.key),
      votes: this.votes,
      tokens: Number(this.tokens),
      payload_bytes: Number(this.bytes),
      identities: ordered.length,
      accounts: ordered.slice(0, accountsMax).map((it) => ({
        id: it.id,
        votes_accepted: it.votes,
        samples: Number(it.samples),
        tokens: Number(it.tokens),
        payload_bytes: Number(it.bytes),
        first_step: it.first,
        last_step: it.last,
        uptime: it.votes / (it.last - it.first + 1),
      })),
    };
  }
}
