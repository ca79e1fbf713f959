"""Routes of operations under `/api/`."""

from django.urls import path

from operations.api.views import DismissView, JobView, OperationsView

urlpatterns = [
    path("operations", OperationsView.as_view()),
    path("operations/<str:job_id>/dismiss", DismissView.as_view()),
    path("backends/job/<str:uid>", JobView.as_view()),
]
