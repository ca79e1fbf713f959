// An error where the eye is: one line on what happened and what to do, details to quote behind it, and a way to try again.
import type { ReactNode } from "react";
import { advice, ApiError } from "../api/client";
import { Button } from "./button";
import { CopyButton } from "./copy";

interface ProblemProps {
  error: Error | null;
  onRetry?: () => void;
  onDismiss?: () => void;
  /** One of many in a list: not announced. */
  quiet?: boolean;
}

export function Problem({ error, onRetry, onDismiss, quiet = false }: ProblemProps): ReactNode {
  if (error === null) return null;
  const apiError = error instanceof ApiError ? error : null;
  const adviceText = apiError === null ? "" : advice(apiError);
  return (
    <div className="problem" role={quiet ? undefined : "alert"}>
      <span className="grow">
        <strong>{error.message}</strong>
        {adviceText !== "" && <> {adviceText}</>}
      </span>
      {apiError !== null && apiError.requestId !== "" && (
        <details>
          <summary>Details</summary>
          <span className="row wrap">
            <code className="anywhere">
              {[`HTTP ${apiError.status}`, apiError.code, `request ${apiError.requestId}`].filter(Boolean).join(" · ")}
            </code>
            <CopyButton small text={`${error.message} (HTTP ${apiError.status}, request ${apiError.requestId})`} label="Copy error" />
          </span>
        </details>
      )}
      {onRetry !== undefined && (
        <Button small onClick={onRetry}>
          Try again
        </Button>
      )}
      {onDismiss !== undefined && (
        <Button small onClick={onDismiss}>
          Close
        </Button>
      )}
    </div>
  );
}
