// The sorted names of a state: half a million of them as one text, which is searched as a whole.

/** Names in plain sorted order, one after the other in `text`, each with a line feed behind it. */
export class Names {
  /** The start of each name in `text`; the last one is the length of the text. */
  readonly offsets: Uint32Array;
  /** The letters of `text`: its bytes, if it is ASCII, else its UTF-16 units. */
  readonly letters: Uint8Array | Uint16Array;
  private folded: string | null = null;
  private hashed: Hashes | null = null;

  /**
   * @param odd the names that a line of text cannot hold (with line feeds, or no valid Unicode), by their number;
   * `text` has stand-ins for them.
   * @param utf8 `text` as UTF-8, if it is at hand
   */
  constructor(
    readonly text: string,
    readonly count: number,
    private readonly odd: ReadonlyMap<number, string> = new Map(),
    utf8: Uint8Array = new TextEncoder().encode(text),
  ) {
    this.letters = utf8.length === text.length ? utf8 : Uint16Array.from({ length: text.length }, (_, at) => text.charCodeAt(at));
    this.offsets = new Uint32Array(count + 1);
    let at = 0;
    for (let n = 0; n < count; n += 1) {
      this.offsets[n] = at;
      at = text.indexOf("\n", at) + 1;
      if (at === 0) throw new Error("the list of names is cut off");
    }
    this.offsets[count] = at;
  }

  /** The name as the checkpoint has it. */
  name(n: number): string {
    return this.odd.get(n) ?? this.line(n);
  }

  /** The name as `text` has it. */
  line(n: number): string {
    return this.text.slice(this.offsets[n]!, this.offsets[n + 1]! - 1);
  }

  /** The number of a name; -1 if there is none. */
  find(name: string): number {
    for (const [n, odd] of this.odd) if (odd === name) return n;
    const at = this.text.startsWith(`${name}\n`) ? 0 : this.text.indexOf(`\n${name}\n`) + 1;
    if (at === 0 && !this.text.startsWith(`${name}\n`)) return -1;
    return this.lineAt(at, 0);
  }

  /** The number of the name at a position of `text`, if it is `from` or later. */
  private lineAt(position: number, from: number): number {
    const { offsets } = this;
    let low = from, step = 1;
    while (low + step < this.count && offsets[low + step]! <= position) step *= 2;
    let high = Math.min(this.count, low + step);
    low += step >> 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (offsets[middle]! <= position) low = middle;
      else high = middle;
    }
    return low;
  }

  /**
   * The numbers of the names that contain all words of a query, ascending; null if it has no words. Upper and lower
   * case are the same. A word with "*", "?" or "[" is a glob of the whole name.
   */
  search(query: string): Uint32Array | null {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return null;
    words.sort((a, b) => b.length - a.length); // long words match less
    let found: Uint32Array | null = null;
    for (const word of words) {
      const glob = /[*?[]/.test(word) ? globOf(word) : null;
      const ends = glob?.pieces?.length === 2 ? glob.pieces : null; // such as *.weight
      const text = ends ? "" : glob ? glob.literal : word;
      if (found && found.length < this.count / 8) found = found.filter((n) => this.lower(n).includes(text));
      else if (text) found = found && found.length < this.count ? intersection(found, this.holding(text)) : this.holding(text);
      found ??= upTo(this.count);
      if (ends) found = this.between(found, ends[0]!, ends[1]!);
      else if (glob && !holdsOnly(glob)) found = found.filter((n) => glob.test.test(this.lower(n)));
    }
    return found;
  }

  /** Prepares what the first search needs. */
  warm(): void {
    void this.lowered;
    void this.hashes;
  }

  get hashes(): Hashes {
    return (this.hashed ??= new Hashes(this));
  }

  private get lowered(): string {
    if (this.folded === null) {
      const lower = this.text.toLowerCase(); // its letters have to stay in their places
      this.folded = lower.length === this.text.length ? lower : this.text.replace(/[A-Z]+/g, (s) => s.toLowerCase());
    }
    return this.folded;
  }

  private lower(n: number): string {
    return this.lowered.slice(this.offsets[n]!, this.offsets[n + 1]! - 1);
  }

  /** The numbers of the names that hold a word; what a name shares with the one before it is not looked at again. */
  private holding(word: string): Uint32Array {
    const text = this.lowered;
    const { offsets, count } = this;
    const shared = this.letters instanceof Uint8Array ? this.hashes.shared : null; // else small letters depend on their neighbours
    const found = new Uint32Array(count);
    const length = word.length;
    let total = 0;
    let next = -1; // the first place of the word from some place before on
    let place = -1; // where the name before has the word
    for (let n = 0; n < count; n += 1) {
      const start = offsets[n]!, common = shared ? shared[n]! : 0;
      if (place < 0 || place + length > common) {
        const from = start + Math.max(0, common - length + 1);
        if (next < from) next = text.indexOf(word, from);
        if (next < 0) break;
        place = next < offsets[n + 1]! ? next - start : -1;
      }
      if (place >= 0) found[total++] = n;
    }
    return found.slice(0, total);
  }

  /** Those of some names that begin and end so, without a letter in common. */
  private between(numbers: Uint32Array, head: string, tail: string): Uint32Array {
    if (!head && !tail) return numbers;
    const text = this.lowered;
    const { offsets } = this;
    const least = head.length + tail.length;
    const last = tail.charCodeAt(tail.length - 1); // NaN without a tail
    return numbers.filter((n) => {
      const start = offsets[n]!, end = offsets[n + 1]! - 1;
      if (end - start < least || (tail && text.charCodeAt(end - 1) !== last)) return false;
      return text.startsWith(tail, end - tail.length) && text.startsWith(head, start);
    });
  }
}

const BASES = [31, 1000003] as const;

/** Two hashes of every name, and of its part after a prefix, without looking at its letters again. */
export class Hashes {
  /** How many letters each name shares with the one before it, from its start on. */
  readonly shared: Uint32Array;
  private readonly whole: Int32Array[];
  private readonly powers: Int32Array[];

  constructor(private readonly names: Names) {
    const { letters, offsets, count } = names;
    let longest = 0;
    for (let n = 0; n < count; n += 1) longest = Math.max(longest, offsets[n + 1]! - offsets[n]!);
    const shared = (this.shared = new Uint32Array(count));
    this.whole = BASES.map(() => new Int32Array(count));
    const [a, b] = this.whole as [Int32Array, Int32Array];
    const [p, q] = BASES.map(() => new Int32Array(longest + 1)) as [Int32Array, Int32Array]; // of the first letters of a name
    for (let n = 0, start = 0, before = 0, last = 0; n < count; n += 1) {
      const length = offsets[n + 1]! - 1 - start;
      const most = Math.min(length, last);
      let at = 0;
      while (at < most && letters[start + at] === letters[before + at]) at += 1;
      shared[n] = at;
      let x = p[at]!, y = q[at]!;
      while (at < length) {
        const c = letters[start + at]!;
        x = (Math.imul(x, BASES[0]) + c) | 0;
        y = (Math.imul(y, BASES[1]) + c) | 0;
        at += 1;
        p[at] = x;
        q[at] = y;
      }
      a[n] = x;
      b[n] = y;
      before = start;
      last = length;
      start = offsets[n + 1]!;
    }
    this.powers = BASES.map((base) => {
      const found = new Int32Array(longest + 1).fill(1);
      for (let n = 1; n <= longest; n += 1) found[n] = Math.imul(found[n - 1]!, base);
      return found;
    });
  }

  /** A function that gives a hash (0 or 1) of a name after its first `length` letters, which it shares with `name`. */
  after(which: 0 | 1, name: number, length: number): (n: number) => number {
    const { letters, offsets } = this.names;
    const whole = this.whole[which]!, powers = this.powers[which]!;
    let prefix = 0;
    for (let at = 0; at < length; at += 1) prefix = (Math.imul(prefix, BASES[which]) + letters[offsets[name]! + at]!) | 0;
    return (n) => (whole[n]! - Math.imul(prefix, powers[offsets[n + 1]! - offsets[n]! - 1 - length]!)) | 0;
  }
}

/** 0, 1, 2, ... */
export function upTo(count: number): Uint32Array {
  const found = new Uint32Array(count);
  for (let n = 0; n < count; n += 1) found[n] = n;
  return found;
}

function intersection(a: Uint32Array, b: Uint32Array): Uint32Array {
  const found = new Uint32Array(Math.min(a.length, b.length));
  let length = 0;
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    const x = a[i]!, y = b[j]!;
    if (x === y) {
      found[length] = x;
      length += 1;
    }
    if (x <= y) i += 1;
    if (y <= x) j += 1;
  }
  return found.slice(0, length);
}

export interface Glob {
  /** Matches whole names; "*" also matches dots. */
  test: RegExp;
  /** Its longest run of plain letters. */
  literal: string;
  /** What stands between the stars; null if there are other signs than stars. */
  pieces: string[] | null;
}

/** Whether a name matches as soon as it holds the glob's literal. */
function holdsOnly({ pieces, literal }: Glob): boolean {
  return pieces?.length === 3 && !pieces[0] && !pieces[2] && pieces[1] === literal;
}

/** A glob as an expression. */
export function globOf(glob: string): Glob {
  let pattern = "", run = "", literal = "";
  const end = () => {
    if (run.length > literal.length) literal = run;
    run = "";
  };
  for (let n = 0; n < glob.length; n += 1) {
    const c = glob[n]!;
    const close = c === "[" ? glob.indexOf("]", n + (glob[n + 1] === "!" ? 3 : 2)) : -1;
    if (c === "*") pattern += pattern.endsWith(".*") ? "" : ".*";
    else if (c === "?") pattern += ".";
    else if (close > 0) {
      const inside = glob.slice(n + 1, close);
      const body = (inside[0] === "!" ? inside.slice(1) : inside).replace(/[\\\]^[]/g, "\\$&");
      pattern += /^.-.$/.test(body) && body[0]! > body[2]! ? "(?!)" : `[${inside[0] === "!" ? "^" : ""}${body}]`;
      n = close;
    } else {
      pattern += c.replace(/[\\^$.*+?()[\]{}|/]/, "\\$&");
      run += c;
      continue;
    }
    end();
  }
  end();
  let test: RegExp;
  try {
    test = new RegExp(`^(?:${pattern})$`, "s");
  } catch {
    test = /(?!)/; // a set that is none, such as [z-a0]
  }
  return { test, literal, pieces: /[?[]/.test(glob) ? null : glob.split(/\*+/) };
}
