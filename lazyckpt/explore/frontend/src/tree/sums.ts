// Totals of rows of the tree, from prefix sums over its order.

import type { Norms, State } from "./load";
import type { Node, Tree } from "./nodes";

/** What a row is the total of: a node, a tensor or all below it, at some places of the order. */
export interface Part {
  node: Node;
  leaf: boolean;
  copies: readonly number[];
}

export class Sums {
  private readonly numels: Float64Array;
  private readonly sizes: Float64Array;

  constructor(
    private readonly tree: Tree,
    state: State,
  ) {
    this.numels = new Float64Array(tree.count + 1);
    this.sizes = new Float64Array(tree.count + 1);
    const any = state.twice.size > 0;
    let numel = 0, size = 0;
    for (let place = 0; place < tree.count; place += 1) {
      const n = tree.at(place);
      if (!any || !state.twice.has(n)) {
        numel += state.numel(n);
        size += state.bytes(n);
      }
      this.numels[place + 1] = numel;
      this.sizes[place + 1] = size;
    }
  }

  tensors({ node, leaf, copies }: Part): number {
    return (leaf ? 1 : node.high - node.low) * copies.length;
  }

  numel(part: Part): number {
    return this.first(part, this.numels) * part.copies.length;
  }

  bytes(part: Part): number {
    return this.first(part, this.sizes) * part.copies.length;
  }

  /** Of the first copy; the others have the same shapes and dtypes. */
  private first({ node, leaf }: Part, sums: Float64Array): number {
    return leaf ? sums[node.leaf + 1]! - sums[node.leaf]! : sums[node.high]! - sums[node.low]!;
  }

  /** The numbers of the names of a part's first copy. */
  *numbers({ node, leaf }: Part): Iterable<number> {
    if (leaf) yield this.tree.at(node.leaf);
    else for (let place = node.low; place < node.high; place += 1) yield this.tree.at(place);
  }
}

/** Norms of parts of the tree, as far as they are known. */
export class NormSums {
  private readonly squares: Float64Array;
  private readonly unknown: Uint32Array;

  constructor(
    private readonly tree: Tree,
    private readonly norms: Norms,
    state: State,
  ) {
    this.squares = new Float64Array(tree.count + 1);
    this.unknown = new Uint32Array(tree.count + 1);
    for (let place = 0; place < tree.count; place += 1) {
      const n = tree.at(place);
      const norm = norms.norm[n]!;
      const known = !Number.isNaN(norm);
      this.squares[place + 1] = this.squares[place]! + (known && !state.twice.has(n) ? norm * norm : 0);
      this.unknown[place + 1] = this.unknown[place]! + (known ? 0 : 1);
    }
  }

  /** The norm of all of a part; NaN if one of its tensors is not known. */
  norm(part: Part): number {
    const each = part.copies.map((copy) => this.one(part, copy));
    return Math.sqrt(each.reduce((sum, norm) => sum + norm * norm, 0));
  }

  /** The norms of the outermost copies, such as layers, of which there are `series`. */
  series(part: Part, series: number): Float64Array {
    const found = new Float64Array(series);
    const inner = part.copies.length / series;
    for (let n = 0; n < series; n += 1) {
      let sum = 0;
      for (let m = n * inner; m < (n + 1) * inner; m += 1) sum += this.one(part, part.copies[m]!) ** 2;
      found[n] = Math.sqrt(sum);
    }
    return found;
  }

  private one({ node, leaf }: Part, copy: number): number {
    if (leaf) return this.norms.norm[this.tree.at(node.leaf + copy)]!; // its own, also if it is counted elsewhere
    const low = node.low + copy, high = node.high + copy;
    return this.unknown[high]! > this.unknown[low]! ? NaN : Math.sqrt(Math.max(0, this.squares[high]! - this.squares[low]!));
  }
}
