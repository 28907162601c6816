// The pages of the explorer, in the order of the navigation.

import type { ComponentType } from "preact";
import type { About } from "./api";
import { ArchitecturePage } from "./pages/architecture";
import { ComparePage } from "./pages/compare";
import { ExpertsPage } from "./pages/experts";
import { OptimizerPage } from "./pages/optimizer";
import { RanksPage } from "./pages/ranks";
import { RunPage } from "./pages/run";
import { TensorPage } from "./pages/tensor";
import { TreePage } from "./pages/tree";

export interface Page {
  /** The name in links. */
  id: string;
  title: string;
  component: ComponentType;
  /** Parameter of the page -> the shared parameters that it depends on: see `arrival`. */
  bound?: Record<string, readonly string[]>;
  /** Whether a subject has this page. */
  shown(about: About): boolean;
}

const NAME = ["name"];
const PART = { view: NAME, at: NAME, dims: NAME };

export const PAGES: Page[] = [
  { id: "tree", title: "Tensors", component: TreePage, bound: { at: NAME, q: NAME }, shown: () => true },
  { id: "tensor", title: "Tensor", component: TensorPage, bound: { ...PART, of: ["name", "state", "step", "side"] }, shown: () => true },
  { id: "architecture", title: "Architecture", component: ArchitecturePage, shown: () => true },
  { id: "compare", title: "Compare", component: ComparePage, bound: PART, shown: ({ kind, steps }) => kind === "comparison" || (kind === "run" && steps.length > 1) },
  { id: "run", title: "Run", component: RunPage, shown: ({ kind }) => kind === "run" },
  { id: "ranks", title: "Ranks", component: RanksPage, shown: ({ sides }) => sides.some((side) => side.files > 1) },
  { id: "optimizer", title: "Optimizer", component: OptimizerPage, shown: ({ sides }) => sides.some((side) => side.states.length > 1) },
  { id: "experts", title: "Experts", component: ExpertsPage, shown: ({ sides }) => sides.some((side) => side.experts) },
];
