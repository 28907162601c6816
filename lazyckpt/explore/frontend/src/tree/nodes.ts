// The tree of dotted names, built where one looks, and the folding of siblings that are alike.

import type { Names } from "./names";

const LEVELS = 100; // deeper levels share one label
const ALIKE = 4; // the fewest siblings that are folded into one row
const COMPARED = 20_000; // the most names that are compared letter by letter, which takes time at every key
const SORTED = 50_000; // the most siblings that are put into natural order

/** A node: names from `low` to `high` (places in the tree's order) lie below it, and `leaf` is its own, or -1. */
export interface Node {
  label: string;
  /** Length of the prefix that all names below the node have, with the dot. */
  length: number;
  leaf: number;
  low: number;
  high: number;
  level: number;
}

/** Siblings in one row: one node, or several that are alike, with their numbers as text. */
export interface Group {
  nodes: Node[];
  numbers: string;
  /** How the nodes differ from the most of their siblings; "" if they do not. */
  differs: string;
}

export class Tree {
  readonly count: number;
  readonly root: Node;
  private readonly made = new Map<Node, Node[]>();
  private readonly grouped = new Map<Node, Group[]>();

  /**
   * @param kinds the number of each name's shape and dtype
   * @param order the names that the tree has, ascending; null: all
   */
  constructor(
    readonly names: Names,
    readonly kinds: ArrayLike<number>,
    readonly order: Uint32Array | null = null,
    private readonly kindText: (kind: number) => string = String,
  ) {
    this.count = order ? order.length : names.count;
    this.root = { label: "", length: 0, leaf: -1, low: 0, high: this.count, level: 0 };
  }

  /** The number of the name at a place of the order. */
  at(place: number): number {
    return this.order ? this.order[place]! : place;
  }

  /** The part of the names that all below a node share, without the dot at its end. */
  path(node: Node): string {
    if (node.leaf >= 0) return this.names.line(this.at(node.leaf));
    return this.names.line(this.at(node.low)).slice(0, Math.max(0, node.length - 1));
  }

  children(node: Node): Node[] {
    let found = this.made.get(node);
    if (!found) this.made.set(node, (found = this.makeChildren(node)));
    return found;
  }

  private makeChildren(node: Node): Node[] {
    const { names } = this;
    const found = new Map<string, Node>();
    let place = node.low;
    while (place < node.high) {
      const line = names.line(this.at(place));
      const dot = node.level < LEVELS ? line.indexOf(".", node.length) : -1;
      if (dot < 0) {
        const label = line.slice(node.length);
        const same = found.get(label);
        if (same) same.leaf = place;
        else found.set(label, { label, length: line.length + 1, leaf: place, low: place, high: place, level: node.level + 1 });
        place += 1;
      } else {
        const label = line.slice(node.length, dot);
        const stop = this.after(line.slice(0, dot + 1), place, node.high);
        const leaf = found.get(label)?.leaf ?? -1;
        found.set(label, { label, length: dot + 1, leaf, low: place, high: stop, level: node.level + 1 });
        place = stop;
      }
    }
    const children = [...found.values()];
    if (children.length > SORTED) return children;
    const parts = new Map(children.map((child) => [child, partsOf(child.label)]));
    return children.sort((a, b) => ordered(parts.get(a)!, parts.get(b)!));
  }

  /** The first place from `low` on whose name does not begin with the prefix, which that of `low` does. */
  private after(prefix: string, low: number, high: number): number {
    const { names } = this;
    const has = (place: number) => names.text.startsWith(prefix, names.offsets[this.at(place)]!);
    let step = 1;
    while (low + step < high && has(low + step)) step *= 2;
    let end = Math.min(high, low + step);
    let start = low + (step >> 1);
    while (end - start > 1) {
      const middle = (start + end) >> 1;
      if (has(middle)) start = middle;
      else end = middle;
    }
    return end;
  }

  /** A node, or the last one of a chain of single children below it, with the labels joined. */
  chain(node: Node): { label: string; node: Node } {
    let { label } = node;
    while (node.leaf < 0 && node.low < node.high) {
      const line = this.names.line(this.at(node.low));
      const dot = line.indexOf(".", node.length);
      if (dot < 0 ? node.high - node.low > 1 : this.after(line.slice(0, dot + 1), node.low, node.high) < node.high) break;
      const only = this.children(node);
      if (only.length !== 1) break;
      node = only[0]!;
      label += `.${node.label}`;
    }
    return { label, node };
  }

  /** The children, with numbered ones that are alike in one group each. */
  groups(node: Node): Group[] {
    let found = this.grouped.get(node);
    if (!found) this.grouped.set(node, (found = this.makeGroups(node)));
    return found;
  }

  private makeGroups(node: Node): Group[] {
    const children = this.children(node);
    const alone = (one: Node): Group => ({ nodes: [one], numbers: "", differs: "" });
    const numbered = children.filter(({ label, leaf, low, high }) => /^(0|[1-9]\d{0,8})$/.test(label) && (leaf < 0 || low === high));
    if (numbered.length < ALIKE) return children.map(alone);
    const classes = this.classes(numbered);
    const usual = classes.reduce((a, b) => (b.length > a.length ? b : a));
    const stands = classes.length > 1 && usual.length * 2 > numbered.length;
    const first = new Map<Node, Group>();
    const inside = new Set<Node>();
    for (const nodes of classes) {
      const differs = stands && nodes !== usual ? this.difference(nodes[0]!, usual[0]!) : "";
      for (const run of runs(nodes)) {
        const folded = run.length >= ALIKE;
        for (const part of folded ? [run] : run.map((one) => [one])) {
          first.set(part[0]!, { nodes: part, numbers: folded ? numbersOf(part) : "", differs });
          part.forEach((one) => inside.add(one));
        }
      }
    }
    return children.flatMap((one) => first.get(one) ?? (inside.has(one) ? [] : [alone(one)]));
  }

  /**
   * The nodes in classes of those with the same names, shapes and dtypes below them. Two hashes tell them apart; where
   * there are not very many names, the names themselves are compared, too.
   */
  private classes(nodes: Node[]): Node[][] {
    const found = new Map<string, Node[][]>();
    for (const node of nodes) {
      const key = this.hash(node);
      const lists = found.get(key) ?? found.set(key, []).get(key)!;
      const list = lists.find(([one]) => this.alike(one!, node));
      if (list) list.push(node);
      else lists.push([node]);
    }
    return [...found.values()].flat();
  }

  private hash(node: Node): string {
    if (node.low === node.high) return `leaf ${this.kinds[this.at(node.leaf)]}`;
    const { hashes } = this.names;
    const first = hashes.after(0, this.at(node.low), node.length);
    const second = hashes.after(1, this.at(node.low), node.length);
    let a = 0, b = 0;
    for (let place = node.low; place < node.high; place += 1) {
      const n = this.at(place), kind = this.kinds[n]!;
      a = (Math.imul(a, 31) + first(n) + kind) | 0;
      b = (Math.imul(b, 1000003) + second(n) + kind) | 0;
    }
    return `${node.high - node.low} ${a} ${b}`;
  }

  private alike(a: Node, b: Node): boolean {
    if ((a.low === a.high) !== (b.low === b.high)) return false;
    if (a.low === a.high) return this.kinds[this.at(a.leaf)] === this.kinds[this.at(b.leaf)];
    if (a.high - a.low !== b.high - b.low) return false;
    const { text, offsets } = this.names;
    const step = this.count <= COMPARED ? 1 : a.high - a.low; // of very many names only the first
    for (let k = 0; k < a.high - a.low; k += step) {
      const m = this.at(a.low + k), n = this.at(b.low + k);
      if (this.kinds[m] !== this.kinds[n]) return false;
      let i = offsets[m]! + a.length, j = offsets[n]! + b.length;
      const end = offsets[m + 1]!;
      if (end - i !== offsets[n + 1]! - j) return false;
      for (; i < end; i += 1, j += 1) if (text.charCodeAt(i) !== text.charCodeAt(j)) return false;
    }
    return true;
  }

  /** How a node differs from another one, in a few words. */
  private difference(node: Node, usual: Node): string {
    const own = this.below(node), other = this.below(usual);
    const more = listed([...own.keys()].filter((name) => !other.has(name)));
    const less = listed([...other.keys()].filter((name) => !own.has(name)));
    const changed = [...own].filter(([name, kind]) => other.has(name) && other.get(name) !== kind);
    const first = changed[0];
    const kinds = first
      ? `${first[0]} is ${this.kindText(first[1])}, not ${this.kindText(other.get(first[0])!)}${changed.length > 1 ? `, and ${changed.length - 1} more` : ""}`
      : "";
    return [more && `has ${more}`, less && `lacks ${less}`, kinds].filter(Boolean).join("; ");
  }

  private below(node: Node): Map<string, number> {
    const found = new Map<string, number>();
    for (let place = node.low; place < node.high; place += 1) {
      const n = this.at(place);
      found.set(this.names.line(n).slice(node.length), this.kinds[n]!);
    }
    if (node.low === node.high) found.set("", this.kinds[this.at(node.leaf)]!);
    return found;
  }
}

/** A few names; those that differ in numbers only are one. */
function listed(names: string[]): string {
  const found = [...new Set(names.map((name) => name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*")))];
  return found.slice(0, 2).join(", ") + (found.length > 2 ? ` and ${found.length - 2} more` : "");
}

/** Runs of evenly spaced numbers; after a run that is too short to fold, the next one starts at its second node. */
function runs(nodes: Node[]): Node[][] {
  const found: Node[][] = [];
  const number = (n: number) => Number(nodes[n]!.label);
  let at = 0;
  while (at < nodes.length) {
    let end = at + 1;
    while (end < nodes.length && (end === at + 1 || number(end) - number(end - 1) === number(at + 1) - number(at))) end += 1;
    const length = end - at >= ALIKE ? end - at : 1;
    found.push(nodes.slice(at, at + length));
    at += length;
  }
  return found;
}

function numbersOf(nodes: Node[]): string {
  const step = Number(nodes[1]!.label) - Number(nodes[0]!.label);
  return `${nodes[0]!.label}–${nodes[nodes.length - 1]!.label}${step > 1 ? ` (every ${step}.)` : ""}`;
}

/** Orders "layers.9" before "layers.10". */
export function natural(a: string, b: string): number {
  return ordered(partsOf(a), partsOf(b));
}

/** A text as numbers and what stands between them. */
function partsOf(text: string): string[] {
  return text.match(/\d+|\D+/g) ?? [];
}

function ordered(left: string[], right: string[]): number {
  for (let n = 0; n < Math.min(left.length, right.length); n += 1) {
    const p = left[n]!, q = right[n]!;
    if (p === q) continue;
    const numbers = isDigit(p) && isDigit(q);
    if (numbers && Number(p) !== Number(q)) return Number(p) - Number(q);
    return p < q ? -1 : 1;
  }
  return left.length - right.length;
}

function isDigit(text: string): boolean {
  const c = text.charCodeAt(0);
  return c >= 48 && c <= 57;
}
