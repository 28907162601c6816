// The rows of the tree that are visible: those whose parents are open.

import type { Group, Node, Tree } from "./nodes";

export interface Row {
  /** Identifies the row: the path of its node, with the numbers of folded siblings. */
  key: string;
  label: string;
  /** Numbers of the alike siblings that the row stands for; "" for one node. */
  numbers: string;
  differs: string;
  depth: number;
  /** The node, or the first one of several that are alike. */
  node: Node;
  /** Whether the row is a tensor; else it is a group. */
  leaf: boolean;
  /** How far, in places of the order, the nodes that the row stands for are from `node`; the first is 0. */
  copies: readonly number[];
  /** The number of outermost folded siblings, such as layers; `copies` has those of the first one first. */
  series: number;
  /** The numbers of the outermost folded siblings. */
  labels: readonly number[];
  open: boolean;
  /** Place among its siblings, from 1 on, and their number. */
  place: number;
  siblings: number;
  parent: number;
}

const SHOWN = 40; // rows up to which levels are open at first

/** What sorts siblings: larger values first; null keeps the natural order. */
export type Weight = ((node: Node, leaf: boolean, copies: readonly number[]) => number) | null;

/** The rows below the open nodes, in order. `unfolded` are the keys of folded siblings that are listed one by one. */
export function visibleRows(tree: Tree, open: ReadonlySet<string>, unfolded: ReadonlySet<string>, weight: Weight = null): Row[] {
  const rows: Row[] = [];
  const visit = (node: Node, path: string, depth: number, copies: readonly number[], labels: readonly number[], parent: number) => {
    const found = entries(tree, node, path, unfolded);
    const made = found.flatMap((entry) => rowsOf(entry, depth, copies, labels, parent));
    if (weight) {
      const keys = new Map(made.map((row) => [row, weight(row.node, row.leaf, row.copies)]));
      made.sort((a, b) => order(keys.get(b)!, keys.get(a)!));
    }
    made.forEach((row, n) => {
      row.place = n + 1;
      row.siblings = made.length;
      row.open = !row.leaf && open.has(row.key);
      const at = rows.push(row) - 1;
      if (row.open) visit(row.node, row.key, depth + 1, row.copies, row.labels, at);
    });
  };
  visit(tree.root, "", 0, [0], [0], -1);
  return rows;
}

function order(a: number, b: number): number {
  return Number.isNaN(a) ? (Number.isNaN(b) ? 0 : -1) : Number.isNaN(b) ? 1 : a - b;
}

interface Entry extends Group {
  key: string;
  label: string;
}

function entries(tree: Tree, node: Node, path: string, unfolded: ReadonlySet<string>): Entry[] {
  const under = path ? `${path}.` : "";
  return tree.groups(node).flatMap((group): Entry[] => {
    const key = `${under}[${group.numbers}]`;
    if (group.numbers && !unfolded.has(key)) return [{ ...group, key, label: group.numbers }];
    return group.nodes.map((one) => {
      const chained = tree.chain(one);
      return { nodes: [chained.node], numbers: "", differs: group.differs, key: under + chained.label, label: chained.label };
    });
  });
}

function rowsOf(entry: Entry, depth: number, outer: readonly number[], labels: readonly number[], parent: number): Row[] {
  const [first] = entry.nodes as [Node, ...Node[]];
  const base = { key: entry.key, label: entry.label, numbers: entry.numbers, differs: entry.differs, depth, node: first, open: false, place: 1, siblings: 1, parent };
  const starts = (one: Node) => (one.low < one.high ? one.low : one.leaf);
  const shifts = entry.nodes.map((one) => starts(one) - starts(first));
  const copies = shifts.length === 1 ? outer : outer.length === 1 ? shifts : added(outer, shifts);
  const outermost = outer.length === 1 && shifts.length > 1;
  const numbers = outermost ? entry.nodes.map(({ label }) => Number(label)) : labels;
  const more = { copies, labels: numbers, series: numbers.length };
  const found: Row[] = [];
  if (first.leaf >= 0) found.push({ ...base, ...more, leaf: true });
  if (first.low < first.high) found.push({ ...base, ...more, key: first.leaf >= 0 ? `${entry.key}.` : entry.key, leaf: false });
  return found;
}

function added(outer: readonly number[], inner: readonly number[]): number[] {
  const found = new Array<number>(outer.length * inner.length);
  let at = 0;
  for (const a of outer) for (const b of inner) found[at++] = a + b;
  return found;
}

/** The keys of the nodes that are open at first: level by level, as long as few rows are visible. */
export function openAtFirst(tree: Tree, most = SHOWN): Set<string> {
  const open = new Set<string>();
  const none = new Set<string>();
  const keep = new Set<string>(); // what would take too much room
  for (;;) {
    const rows = visibleRows(tree, open, none);
    const closed = rows.filter((row) => !row.leaf && !row.open && !row.differs && !keep.has(row.key));
    if (!closed.length) return open;
    let room = most - rows.length;
    for (const row of closed) {
      const more = visibleBelow(tree, row);
      if (more > room) keep.add(row.key);
      else {
        open.add(row.key);
        room -= more;
      }
    }
  }
}

/** The rows that opening a row adds. */
function visibleBelow(tree: Tree, row: Row): number {
  return entries(tree, row.node, row.key, new Set()).reduce((n, { nodes: [first] }) => n + (first!.leaf >= 0 && first!.low < first!.high ? 2 : 1), 0);
}

/** The keys of the groups on the way to a name, so that its row is visible when they are open. */
export function openTo(tree: Tree, name: number, unfolded: ReadonlySet<string>): string[] {
  const keys: string[] = [];
  let node = tree.root, path = "";
  for (let guard = 0; guard < 200; guard += 1) {
    const holds = (one: Node) => one.leaf >= 0 && tree.at(one.leaf) === name;
    const found = entries(tree, node, path, unfolded).find(({ nodes }) =>
      nodes.some((one) => holds(one) || (tree.at(one.low) <= name && one.low < one.high && name <= tree.at(one.high - 1))),
    );
    if (!found) return keys;
    const inside = found.nodes.find((one) => holds(one) || (tree.at(one.low) <= name && one.low < one.high && name <= tree.at(one.high - 1)))!;
    if (holds(inside)) return keys;
    keys.push(inside.leaf >= 0 ? `${found.key}.` : found.key);
    // folded siblings show the first one: go on with what stands for the name there
    const first = found.nodes[0]!;
    if (inside !== first) name = tree.at(first.low + placeOf(tree, name, inside) - inside.low);
    node = first;
    path = keys[keys.length - 1]!;
  }
  return keys;
}

function placeOf(tree: Tree, name: number, node: Node): number {
  if (!tree.order) return name;
  let low = node.low, high = node.high;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tree.at(middle) < name) low = middle + 1;
    else high = middle;
  }
  return low;
}
