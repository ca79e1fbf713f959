"""Routes of operations under `/api/`."""

from django.urls import path

from operations.api.views import JobView, OperationsView

urlpatterns = [
    path("operations", OperationsView.as_view()),
    path("backends/job/<str:uid>", JobView.as_view()),
]
